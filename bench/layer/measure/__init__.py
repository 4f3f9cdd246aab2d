"""What is measured, how, and what is said of it. All but device, case and race is without torch."""
