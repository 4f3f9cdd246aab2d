"""The table of scripts/coverage: percentages per file, and every uncovered range of lines with its reason.

    report.py GCOVR.json REASONS.txt DOCUMENT.md

Exits 1 when a range has no reason in REASONS.txt, and names it.
"""

import json
import pathlib
import sys

NOT_BUILT = "*"  # in place of a line's text: the file is not part of this build


def read_reasons(path):
    """{file: [(text, reason)]} from lines `file | text | reason`."""
    reasons = {}
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        file, text, reason = (part.strip() for part in line.split(" | ", 2))
        reasons.setdefault(file, []).append((text, reason))
    return reasons


def ranges_of(lines):
    """Uncovered lines [(first, last)]; two are one range when no line that ran is between them."""
    ranges = []
    open_range = False
    for number, count in sorted(lines.items()):
        if count > 0:
            open_range = False
        elif open_range:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
            open_range = True
    return [tuple(pair) for pair in ranges]


def statement_at(source, first):
    """The statement that begins on a line, as one line of text: messages stand below the call that they are of."""
    end = next((i for i in range(first - 1, len(source)) if source[i].rstrip().endswith((";", "{", "}"))), first - 1)
    return " ".join(line.strip() for line in source[first - 1 : end + 1])


def reason_for(reasons, file, text):
    return next((reason for pattern, reason in reasons.get(file, []) if pattern != NOT_BUILT and pattern in text), None)


def counts_by_file(path):
    report = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    return {
        file["file"]: {line["line_number"]: line["count"] for line in file["lines"] if not line["gcovr/noncode"]}
        for file in report["files"]
    }


def main():
    counts, reasons, document = counts_by_file(sys.argv[1]), read_reasons(sys.argv[2]), sys.argv[3]
    table, listed, missing = [], [], []
    total = ran = 0
    for file, lines in sorted(counts.items()):
        if not lines:
            continue
        covered = sum(count > 0 for count in lines.values())
        total, ran = total + len(lines), ran + covered
        table.append(f"| `{file}` | {len(lines)} | {covered} | {100 * covered / len(lines):.1f}% |")
        source = pathlib.Path(file).read_text(encoding="utf-8").splitlines()
        for number, (first, last) in enumerate(ranges_of(lines)):
            text = statement_at(source, first)
            reason = reason_for(reasons, file, text)
            if reason is None:
                missing.append(f"{file}:{first}: did not run, and has no reason: {text}")
            where = f"{first}" if first == last else f"{first}-{last}"
            listed += [f"\n`{file}`\n"] if number == 0 else []
            listed.append(f"- {where}: {reason}")
    for file, entries in sorted(reasons.items()):
        listed += [f"\n`{file}`\n\n- all: {reason}" for text, reason in entries if text == NOT_BUILT]

    print("\n".join(table + listed))
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return 1
    pathlib.Path(document).write_text(
        "\n".join(
            [
                "# Coverage of abi/ and plugin/",
                "",
                "Written by `scripts/coverage`: lines that the suites, the command and `moxie conform` run in a build",
                "without CUDA. Reasons are in `host_tests/coverage/reasons.txt`. Processes that a test kills leave no",
                "counts.",
                "",
                "| File | Lines | Ran | |",
                "|---|---:|---:|---:|",
                *table,
                f"| all | {total} | {ran} | {100 * ran / total:.1f}% |",
                "",
                "## Lines that did not run",
                *listed,
                "",
            ]
        ),
        encoding="utf-8",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
