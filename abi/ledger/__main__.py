"""abi.h -> abi/ledger.json -> everything else that repeats abi.h.

    python3 abi/ledger            writes what is generated, unless abi.h breaks what is published
    python3 abi/ledger --check    writes nothing; says what differs, exits 1

abi/README.md says why it is made this way round.
"""

import json
import pathlib
import sys

import frozen
import outputs
from header import Header, HeaderError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
def first_difference(path, wanted):
    """ "path:line: ..." where the file differs from what it should be, or None."""
    if not path.exists():
        return f"{path.relative_to(ROOT)} is missing"
    seen = path.read_text()
    if seen == wanted:
        return None
    seen, wanted = seen.splitlines(), wanted.splitlines()
    line = next((index for index, (a, b) in enumerate(zip(seen, wanted)) if a != b),
                min(len(seen), len(wanted)))
    said = [f"'{text[line].strip()}'" if line < len(text) else "nothing" for text in (seen, wanted)]
    return (f"{path.relative_to(ROOT)}:{line + 1}: is {said[0]}, abi.h makes it {said[1]}; "
            f"run {outputs.COMMAND} and commit what it writes")


def main(arguments):
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    try:
        ledger = Header((ROOT / "abi.h").read_text()).ledger()
        made = outputs.generate(ledger, ROOT)
    except HeaderError as error:
        print(error)
        return 1
    number = ".".join(ledger["version"].split(".")[:2])
    baseline = ROOT / f"abi/baseline/ledger-{number}.json"
    if baseline.exists():
        found = frozen.complaints(json.loads(baseline.read_text()), ledger)
        if found:
            print("\n".join(found))
            return 1
    else:  # the first ledger of a version is what is published of it
        made[str(baseline.relative_to(ROOT))] = outputs.ledger_json(ledger)
    if arguments:
        found = [said for said in (first_difference(ROOT / path, text)
                                   for path, text in made.items()) if said]
        print("\n".join(found), end="\n" if found else "")
        return 1 if found else 0
    for path, text in made.items():
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text:
            (ROOT / path).write_text(text)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
