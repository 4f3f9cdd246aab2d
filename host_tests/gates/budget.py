"""Holds what ptxas says of each kernel against kernels/cuda/budget.txt. Needs nvcc and no GPU.

    budget.py COMPILE_COMMANDS BUDGET [LIBRARY CUOBJDUMP]

The build keeps ptxas' report beside each object (cmake/ptxas_report.sh): a library does not tell spilled bytes from other
stack, and cuobjdump, which reads libraries, is not part of every toolkit. Where it is there, it says that the library
holds no other machine code and no PTX.
"""

import json
import os
import re
import shlex
import subprocess
import sys

TARGET = "sm_90a"
KERNELS_MAX = 66  # which two cores build in three minutes
COLUMNS = ("registers", "stack", "spilled", "shared")


def demangle(symbol):
    """gemm_kernel<true, false>: without the anonymous namespace, whose name is a hash, and without the parameters."""
    text = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()
    text = re.sub(r"_GLOBAL__N__\w+::|\(anonymous namespace\)::", "", text)
    name = re.match(r"(?:void )?([^(]*)", text)
    return name.group(1).strip()


def parse_report(text):
    """What `ptxas -v` printed: rows of kernel, target and COLUMNS."""
    rows = []
    for part in text.split("Compiling entry function ")[1:]:
        # Functions that were not inlined follow the kernel that calls them; the kernel's lines come first.
        symbol, target = re.match(r"'(\S+)' for '(\S+)'", part).groups()
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        rows.append({"kernel": demangle(symbol), "target": target,
                     "registers": int(re.search(r"Used (\d+) registers", part).group(1)),
                     "stack": int(frame.group(1)), "spilled": int(frame.group(2)) + int(frame.group(3)),
                     "shared": int(shared.group(1)) if shared else 0})
    return rows


def parse_budget(text):
    """{kernel: {column: most}} and what is wrong with the table itself."""
    budget, wrong = {}, []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.split("|")]
        if not line.strip() or line.startswith("#"):
            continue
        if len(cells) != 1 + len(COLUMNS) or not all(cell.isdigit() for cell in cells[1:]):
            wrong.append("line %d is not a kernel and %d numbers: %s" % (number, len(COLUMNS), line.strip()))
        elif cells[0] in budget:
            wrong.append("%s has two rows" % cells[0])
        else:
            budget[cells[0]] = dict(zip(COLUMNS, map(int, cells[1:])))
    return budget, wrong


def judge(report, budget):
    """A sentence for everything that is over its budget or has none."""
    wrong = []
    for row in report:
        kernel, most = row["kernel"], budget.get(row["kernel"])
        if row["target"] != TARGET:
            wrong.append("%s is compiled for %s, and only %s is wanted" % (kernel, row["target"], TARGET))
        if most is None:
            wrong.append("%s has no row: it takes %s" % (kernel, " | ".join(str(row[name]) for name in COLUMNS)))
            continue
        for name in COLUMNS:
            if row[name] > most[name]:
                wrong.append("%s: %s is %d, and its row allows %d" % (kernel, name, row[name], most[name]))
    seen = {row["kernel"] for row in report}
    wrong += ["%s has a row, and no such kernel is built" % kernel for kernel in budget if kernel not in seen]
    if len(report) > KERNELS_MAX:
        wrong.append("%d kernels are built; at most %d are wanted" % (len(report), KERNELS_MAX))
    return wrong


def judge_products(source, text):
    """Products that ptxas takes one after the other, each waited for, which it says once a kernel and nobody reads."""
    return ["%s: ptxas serialises wgmma in %s: %s" % (source, demangle(symbol), why.strip())
            for why, symbol in re.findall(r"wgmma\.mma_async instructions are serialized due to (.*?) in (?:the )?function '(\S+)'", text)]


def judge_command(source, words):
    """What `words`, which compile `source`, would put into the library besides code for TARGET."""
    codes = [word for word in words if "code=" in word]
    if codes and all(re.search(r"code=\[?%s\]?$" % TARGET, word) for word in codes):
        return []
    return ["%s is compiled with %s, and only code=%s is wanted" % (source, " ".join(codes) or "no target", TARGET)]


def judge_library(elf, ptx):
    """What `cuobjdump -lelf` and `-lptx` list."""
    names = re.findall(r"ELF file +\d+: (\S+)", elf)
    wrong = ["the library holds %s, and only %s is wanted" % (name, TARGET)
             for name in names if not name.endswith(".%s.cubin" % TARGET)]
    if not names:
        wrong.append("cuobjdump finds no machine code in the library")
    return wrong + ["the library holds PTX: %s" % name for name in re.findall(r"PTX file +\d+: (\S+)", ptx)]


def is_of_library(entry):
    """The emulator compiles the same files, as C++."""
    return re.search(r"/kernels/cuda/\w+\.cu$", entry["file"]) and "moxie_cuda.dir" in entry["command"]


def read_entry(entry):
    """The report of one entry of compile_commands.json, and what is wrong with the command."""
    words = shlex.split(entry["command"])
    source = os.path.basename(entry["file"])
    wrong = judge_command(source, words)
    report = os.path.join(entry["directory"], words[words.index("-o") + 1] + ".ptxas")
    if not os.path.exists(report):
        return [], wrong + ["%s was compiled without a report: build it again" % source]
    with open(report, encoding="utf-8") as file:
        text = file.read()
    return parse_report(text), wrong + judge_products(source, text)


def main(commands, budget_path, library=None, cuobjdump=None):
    with open(budget_path, encoding="utf-8") as file:
        budget, wrong = parse_budget(file.read())
    with open(commands, encoding="utf-8") as file:
        entries = [entry for entry in json.load(file) if is_of_library(entry)]
    report = []
    for entry in entries:
        rows, trouble = read_entry(entry)
        report += rows
        wrong += trouble
    wrong += judge(report, budget)
    if cuobjdump:
        lists = [subprocess.run([cuobjdump, option, library], capture_output=True, text=True, check=False).stdout
                 for option in ("-lelf", "-lptx")]
        wrong += judge_library(*lists)
    for sentence in wrong:
        print("%s: %s" % (os.path.relpath(budget_path), sentence))
    if not wrong:
        print("%d kernels within their budgets%s" % (len(report), "" if cuobjdump else "; no cuobjdump here"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
