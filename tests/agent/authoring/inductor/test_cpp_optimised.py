"""Words to g++ in Inductor's C++: no two pointers lead to the same place, extremes may be found in
any order, and functions of vectors may take the place of those of numbers.
"""

import platform
import re
import subprocess

import pytest
from kagent.authoring.inductor.cpp import _kernel, _prelude, _summing, _vector_math

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


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64's assembly")


def assembly(kernel, folder, *options):
    """What g++ makes of a kernel."""
    source = f"#include <cmath>\n#include <cstdint>\n{kernel}\n"
    (folder / "kernel.cpp").write_text(source)
    words = ["-std=c++20", "-O3", "-march=x86-64-v3", "-fopenmp", "-DSCHEDULE=static"]
    words += ["-fno-math-errno", "-fno-trapping-math", *options]
    command = ["g++", *words, "-S", "-o", "-", folder / "kernel.cpp"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def innermost_loops(text):
    """What lies between a label of an assembly and a jump back to it."""
    loop = re.compile(r"(?=^((\.L\d+):\n(?:.*\n)+?\tj\w+\t\2\n))", re.MULTILINE)
    loops = [m[1] for m in loop.finditer(text)]
    return [x for x in loops if not any(y in x for y in loops if y != x)]


@X86
@pytest.mark.parametrize("text", [PARALLEL, SEQUENTIAL], ids=["parallel", "sequential"])
def test_a_rows_root_is_computed_once_per_row(text, tmp_path):
    """For each element it made the seed of an RMS norm 17 times as slow (2 cores of an EPYC)."""
    made = _kernel(text, "rms_norm")

    def roots(kernel):
        return sum("sqrt" in body for body in innermost_loops(assembly(kernel, tmp_path)))

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


LARGEST = """
extern "C" void largest(const float* in_ptr0, float* out_ptr0, const int64_t ks0) {
  float tmp_acc0 = -INFINITY;
  for (int64_t x0 = 0; x0 < ks0; ++x0) {
    auto tmp0 = in_ptr0[x0];
    tmp_acc0 = max_propagate_nan(tmp_acc0, tmp0);
  }
  out_ptr0[0] = tmp_acc0;
}
"""


@pytest.mark.parametrize("of", ["max", "min"])
def test_extremes_are_found_in_any_order(of, tmp_path):
    """And NaN at any place is one."""
    kernel = _summing(LARGEST.replace("max_", f"{of}_").replace("-INF", "-INF"[of == "min" :]))
    assert f"#pragma omp simd reduction({of}_propagate_nan:tmp_acc0)\n" in kernel
    program = f"""
#include <cmath>
#include <cstdint>
#include <cstdio>
{_prelude(kernel)}
{kernel}
int main() {{
  float x[77], extreme, with_nan;
  for (int at = 0; at < 77; ++at) {{
    for (int i = 0; i < 77; ++i) x[i] = -std::fabs(i - at) {"" if of == "max" else "* -1"};
    largest(x, &extreme, 77);
    x[at] = NAN;
    largest(x, &with_nan, 77);
    if (extreme != 0 || !std::isnan(with_nan)) return 1;
  }}
}}
"""
    (tmp_path / "largest.cpp").write_text(program)
    made = tmp_path / "largest"
    options = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-Wall", "-Werror"]
    subprocess.run(["g++", *options, "-o", made, tmp_path / "largest.cpp"], check=True)
    assert subprocess.run([made], check=False).returncode == 0


EXPONENTIALS = """
extern "C" void exponentials(const float* __restrict__ in_ptr0, float* __restrict__ out_ptr0) {
  for (int64_t x0 = 0; x0 < 1024; ++x0) {
    auto tmp0 = in_ptr0[x0];
    auto tmp1 = std::exp(tmp0) + std::pow(tmp0, 0.3f);
    out_ptr0[x0] = tmp1;
  }
}
"""


@X86
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="has functions of vectors")
@pytest.mark.parametrize("asked", [1, 0])
def test_exponentials_are_computed_in_vectors(asked, tmp_path):
    text = _vector_math(EXPONENTIALS)
    assert 'extern "C" float powf(float, float) noexcept;' in text
    assert "double" not in text
    found = assembly(text + EXPONENTIALS, tmp_path, f"-DVECTOR_MATH={asked}")
    assert ("_ZGVdN8v_expf" in found) == ("_ZGVdN8vv_powf" in found) == bool(asked)
    assert _vector_math(LARGEST) == ""
