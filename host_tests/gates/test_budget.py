"""The gate of the kernels' budgets finds each fault that it is there for."""

import unittest

import budget

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN12_GLOBAL__N_15smallILb1EEEvv' for 'sm_90a'
ptxas info    : Function properties for _ZN12_GLOBAL__N_15smallILb1EEEvv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 39 registers, used 0 barriers
ptxas info    : Compile time = 19.638 ms
ptxas info    : Compiling entry function '_ZN39_GLOBAL__N__7c0bdb1d_7_gemm_cu_cddbabf85largeENS_4argsE' for 'sm_90a'
ptxas info    : Function properties for _ZN39_GLOBAL__N__7c0bdb1d_7_gemm_cu_cddbabf85largeENS_4argsE
    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 24 bytes cumulative stack size, 384 bytes smem
"""
TABLE = """# a comment
small<true> | 39  | 0  | 0  | 0
large       | 168 | 24 | 24 | 384
"""


class Budget(unittest.TestCase):
    def setUp(self):
        self.report = budget.parse_report(REPORT)
        self.table, wrong = budget.parse_budget(TABLE)
        self.assertEqual(wrong, [])

    def fails(self, sentence):
        wrong = budget.judge(self.report, self.table)
        self.assertEqual(len(wrong), 1, wrong)
        self.assertIn(sentence, wrong[0])

    def test_within(self):
        self.assertEqual([row["kernel"] for row in self.report], ["small<true>", "large"])
        self.assertEqual(budget.judge(self.report, self.table), [])

    def test_over(self):
        for name in budget.COLUMNS:
            with self.subTest(column=name):
                self.setUp()
                self.report[1][name] += 1
                self.fails("large: %s is" % name)

    def test_no_row(self):
        del self.table["large"]
        self.fails("large has no row: it takes 168 | 24 | 24 | 384")

    def test_no_kernel(self):
        del self.report[0]
        self.fails("small<true> has a row, and no such kernel is built")

    def test_serialised_products(self):
        said = ("ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to program "
                "dependence in the function '_ZN12_GLOBAL__N_15smallILb1EEEvv'\n")
        self.assertEqual(budget.judge_products("gemm.cu", REPORT), [])
        self.assertEqual(budget.judge_products("gemm.cu", REPORT + said),
                         ["gemm.cu: ptxas serialises wgmma in small<true>: program dependence"])

    def test_another_target(self):
        self.report[0]["target"] = "sm_90"
        self.fails("compiled for sm_90,")

    def test_too_many(self):
        self.report += [self.report[0]] * (budget.KERNELS_MAX - 1)
        self.fails("%d kernels are built" % (budget.KERNELS_MAX + 1))

    def test_table(self):
        for text in ("small | 1 | 2 | 3", "small | 1 | 2 | 3 | x", TABLE + "large | 1 | 1 | 1 | 1"):
            self.assertEqual(len(budget.parse_budget(text)[1]), 1, text)

    def test_command(self):
        good = "--generate-code=arch=compute_90a,code=[sm_90a]"
        self.assertEqual(budget.judge_command("x.cu", ["nvcc", good]), [])
        for more in ("code=[compute_90a,sm_90a]", "-gencode=arch=compute_80,code=sm_80", "code=sm_90"):
            self.assertEqual(len(budget.judge_command("x.cu", ["nvcc", good, more])), 1, more)
        self.assertEqual(len(budget.judge_command("x.cu", ["nvcc"])), 1)

    def test_library(self):
        elf = "ELF file    1: libmoxie.1.sm_90a.cubin\n"
        self.assertEqual(budget.judge_library(elf, ""), [])
        self.assertEqual(len(budget.judge_library("", "")), 1)
        self.assertEqual(len(budget.judge_library(elf + "ELF file    2: libmoxie.2.sm_80.cubin\n", "")), 1)
        self.assertEqual(len(budget.judge_library(elf, "PTX file    1: libmoxie.1.sm_90a.ptx\n")), 1)


if __name__ == "__main__":
    unittest.main()
