"""SM clock, power, temperature and what holds the clock back, from nvidia-smi in the background."""

import shutil
import subprocess
import threading
import time

REASONS = {  # bits of clocks_event_reasons.active, without that of an idle GPU
    0x2: "application_clocks", 0x4: "power_cap", 0x8: "hardware_slowdown", 0x10: "sync_boost",
    0x20: "software_thermal", 0x40: "hardware_thermal", 0x80: "power_brake",
    0x100: "display_clocks"}
FIELDS = "clocks.sm,power.draw,temperature.gpu"
PERIOD_MS = 200


def parse(line):
    """(MHz, W, degrees, reasons' bits), or None for a line that says something else."""
    parts = [part.strip() for part in line.split(",")]
    try:
        mhz, watts, degrees = (float(part) for part in parts[:3])
        return mhz, watts, degrees, int(parts[3], 16)
    except (ValueError, IndexError):
        return None


def names(bits):
    return [name for bit, name in REASONS.items() if bits & bit]


def summarise(samples):
    """Of samples as parse returns them; None of none."""
    if not samples:
        return None
    columns = list(zip(*samples))
    bits = 0
    for each in columns[3]:
        bits |= each
    middle = sorted(columns[0])[len(samples) // 2]
    return {"sm_mhz": {"least": min(columns[0]), "median": middle, "most": max(columns[0])},
            "power_w_most": max(columns[1]), "temperature_most": max(columns[2]),
            "held_back_by": names(bits), "samples": len(samples)}


class Clocks:
    """Samples from start to stop; `reason` says why there are none."""

    def __init__(self, gpu):
        self.samples, self.child, self.reason = [], None, None
        program = shutil.which("nvidia-smi")
        if gpu is None or program is None:
            self.reason = "no GPU" if gpu is None else "nvidia-smi is not there"
            return
        for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
            command = [program, f"--id={gpu}", f"--query-gpu={FIELDS},{reasons}",
                       "--format=csv,noheader,nounits"]
            once = subprocess.run(command, capture_output=True, text=True, check=False)
            if once.returncode == 0 and parse(once.stdout.strip()) is not None:
                self._watch(command)
                return
        self.reason = "nvidia-smi: " + (once.stdout + once.stderr).strip()[:200]

    def _watch(self, command):
        self.child = subprocess.Popen([*command, f"--loop-ms={PERIOD_MS}"], text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.child.stdout:
            sample = parse(line)
            if sample is not None:
                self.samples.append((time.monotonic(), sample))

    def between(self, start, end):
        """summarise() of the time from start to end, as time.monotonic() has it."""
        return summarise([sample for when, sample in list(self.samples) if start <= when <= end])

    def stop(self):
        if self.child is not None:
            self.child.terminate()
            self.child.wait()
            self.reader.join()
            self.child.stdout.close()
            self.child = None
