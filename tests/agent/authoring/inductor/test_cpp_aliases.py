"""What g++ knows of pointers in Inductor's C++: no two lead to the same place."""

import platform
import re
import subprocess

import pytest
from kagent.authoring.inductor.cpp import _kernel

RMS_NORM = """
extern "C"  void kernel(const float* in_ptr0,
                       const float* in_ptr1,
                       float* out_ptr0,
                       float* out_ptr1,
                       const int64_t ks0,
                       const int64_t ks1)
{
    REGION
    {
        #pragma omp for
        for(int64_t x0=0L; x0<static_cast<int64_t>(ks0); x0+=1L)
        {
            {
                float tmp_acc0 = 0;
                for(int64_t x1=0L; x1<static_cast<int64_t>(ks1); x1+=1L)
                {
                    auto tmp0 = in_ptr0[static_cast<int64_t>(x1 + ks1*x0)];
                    auto tmp1 = float(tmp0 * tmp0);
                    tmp_acc0 = tmp_acc0 + tmp1;
                }
                out_ptr0[static_cast<int64_t>(x0)] = tmp_acc0;
            }
            #pragma GCC ivdep
            for(int64_t x1=0L; x1<static_cast<int64_t>(ks1); x1+=1L)
            {
                auto tmp0 = in_ptr0[static_cast<int64_t>(x1 + ks1*x0)];
                auto tmp1 = out_ptr0[static_cast<int64_t>(x0)];
                auto tmp2 = in_ptr1[static_cast<int64_t>(x1)];
                auto tmp3 = static_cast<float>(ks1);
                auto tmp4 = tmp1 / tmp3;
                auto tmp5 = 1 / std::sqrt(tmp4);
                auto tmp6 = float(tmp0 * tmp5);
                auto tmp7 = float(tmp6 * tmp2);
                out_ptr1[static_cast<int64_t>(x1 + ks1*x0)] = tmp7;
            }
        }
    }
}
"""
PARALLEL = RMS_NORM.replace("REGION", "#pragma omp parallel")
SEQUENTIAL = re.sub("#pragma omp for", "", RMS_NORM.replace("REGION", ""))


def innermost_loops(kernel, folder):
    """Assembly that g++ makes of a kernel: what lies between a label and a jump back to it."""
    source = f"#include <cmath>\n#include <cstdint>\n{kernel}\n"
    (folder / "kernel.cpp").write_text(source)
    options = ["-std=c++20", "-O3", "-march=x86-64-v3", "-fopenmp", "-DSCHEDULE=static"]
    options += ["-fno-math-errno", "-fno-trapping-math"]
    command = ["g++", *options, "-S", "-o", "-", folder / "kernel.cpp"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loop = re.compile(r"(?=^((\.L\d+):\n(?:.*\n)+?\tj\w+\t\2\n))", re.MULTILINE)
    loops = [m[1] for m in loop.finditer(text)]
    return [x for x in loops if not any(y in x for y in loops if y != x)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64's assembly")
@pytest.mark.parametrize("text", [PARALLEL, SEQUENTIAL], ids=["parallel", "sequential"])
def test_a_rows_root_is_computed_once_per_row(text, tmp_path):
    """For each element it made the seed of an RMS norm 17 times as slow (2 cores of an EPYC)."""
    made = _kernel(text, "rms_norm")

    def roots(kernel):
        return sum("sqrt" in body for body in innermost_loops(kernel, tmp_path))

    assert (roots(made), roots(made.replace("__restrict__", ""))) == (0, 1)


def test_a_region_gets_the_parameters_that_it_uses():
    text = _kernel(PARALLEL, "rms_norm").replace("*", "* ").splitlines()
    pointers = [
        "const float*  __restrict__ in_ptr0",
        "const float*  __restrict__ in_ptr1",
        "float*  __restrict__ out_ptr0",
        "float*  __restrict__ out_ptr1",
    ]
    sizes = ["const int64_t ks0", "const int64_t ks1"]
    assert text[1] == f"  const auto part1 = [&]({', '.join([*pointers, *sizes])}) {{"
    assert text[-4:] == [
        "  };",
        "  #pragma omp parallel",
        "  part1(in_ptr0, in_ptr1, out_ptr0, out_ptr1, ks0, ks1);",
        "}",
    ]
    unused = PARALLEL.replace("in_ptr1[static_cast<int64_t>(x1)]", "1.0f")
    assert "part1(in_ptr0, out_ptr0, out_ptr1, ks0, ks1);" in _kernel(unused, "rms_norm")


def test_a_region_that_stores_nothing_stays():
    sums = PARALLEL.replace("out_ptr0[static_cast<int64_t>(x0)] =", "tmp_acc1 =")
    sums = sums.replace("out_ptr1[static_cast<int64_t>(x1 + ks1*x0)] =", "tmp_acc1 +=")
    assert "__restrict__" not in _kernel(sums, "sums")


def test_a_buffer_of_two_names_has_one():
    text = PARALLEL.replace("out_ptr0[", "out_ptr2[")
    text = text.replace("    #pragma omp par", "    auto out_ptr2 = out_ptr0;\n    #pragma omp par")
    assert _kernel(text, "rms_norm") == _kernel(PARALLEL, "rms_norm")
