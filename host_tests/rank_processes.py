"""For suites that run themselves again as several ranks, a process each."""

import os
import subprocess
import sys


def run(case, program, folder, ranks, seconds, environment):
    """`program rank FOLDER RANK` for each rank, with what environment(rank) adds. Where one does not
    end well within so many seconds, the test case fails with what it said."""
    processes = [subprocess.Popen([sys.executable, program, "rank", folder, str(rank)],
                                  env={**os.environ, **environment(rank)},
                                  text=True, stderr=subprocess.PIPE)
                 for rank in range(ranks)]
    try:
        for each in processes:
            _, error = each.communicate(timeout=seconds)
            case.assertEqual(each.returncode, 0, error)
    finally:
        for each in processes:
            each.kill()
