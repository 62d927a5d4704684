"""Tasks made of PyTorch code: everything but the check's own process is real."""

from dataclasses import dataclass
from types import SimpleNamespace

import kagent
import pytest
import torch
from kagent.authoring import new_task
from kagent.authoring.draft.cases import make_draft
from kagent.authoring.draft.draft import DraftKind, TaskDraft
from kagent.authoring.draft.inputs import draw_example
from kagent.authoring.draft.pointers import rounded_index
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.draft.rooms import find_rooms, parse_vary
from kagent.authoring.draft.toml import task_toml
from kagent.authoring.errors import AuthoringError
from kagent.authoring.importers.kernelbench import read_problem
from kagent.authoring.importers.kernelbench_files import problem_files
from kagent.authoring.new_task import make_task
from kagent.authoring.tracing.drawing import drawn_by, observed, recorded
from kagent.authoring.tracing.operation import make_operation
from kagent.authoring.tracing.trace import trace
from kagent.cli.new import made_text
from kagent_sandbox.data.calibration import Calibration, KindCalibration, write_calibration
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import TaskError, UserError
from torch import nn
from torch.nn import functional as F
from traced_functions import RMSNorm, every_axis, traced, written

BIG = torch.arange(999.0).sin()
PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, channels, kernel):
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, kernel)
        norm = self.norm = nn.BatchNorm2d(16)
        self.after = lambda y: torch.relu(norm(y))

    def forward(self, x, sign):
        return self.after(self.conv(x)) * sign

def get_inputs():
    return [torch.rand(32, 8, 40, 24), torch.randint(0, 2, (32, 1, 1, 1)).float() * 2 - 1]

def get_init_inputs():
    return [8, 3]
"""


def test_a_module_becomes_a_sound_task(tmp_path, in_process):
    operation = make_operation(RMSNorm, torch.randn(96, 64))
    made = make_task(operation, tmp_path / "t", seeds=False)
    task = load_task(tmp_path / "t")
    assert made.holes == ()
    assert task.signature == "rms_norm(x: Tensor[M, N], weight: Tensor[N]) -> Tensor[M, N]"
    assert task.bytes == "(2 * M * N + N) * itemsize"
    assert task.gpu.bench[0].dims == {"M": 96, "N": 64}
    sizes = {tuple(c.dims.values()) for c in task.cpu.check}
    assert any(1 in s for s in sizes)
    assert {c.inputs for c in task.cpu.check} >= {"normal", "mixed", "spiked"}
    with pytest.raises(UserError, match="it is there already"):
        make_task(operation, tmp_path / "t")


def test_another_operation_takes_the_place_of_a_calibrated_one(tmp_path, in_process, monkeypatch):
    folder = tmp_path / "t"
    make_task(make_operation(RMSNorm, torch.randn(96, 64)), folder, seeds=False)
    known = KindCalibration(load_task(folder).digest, "", "", "", 0, (), {}, {})
    write_calibration(folder, Calibration({"cpu": known}))
    (folder / "mine.py").write_text("")
    other = make_operation(nn.SiLU, torch.randn(96, 64))
    made = make_task(other, folder, seeds=False, force=True)
    assert made.task.signature == "si_lu(input: Tensor[M, N]) -> Tensor[M, N]"
    assert made.task.calibration is None
    assert (folder / "mine.py").exists()

    def faulty(folder, **_):
        raise TaskError(f"{folder.folder / 'reference.py'}: wrong")

    monkeypatch.setattr(new_task, "check_kinds", faulty)
    before = (folder / "task.toml").read_bytes()
    with pytest.raises(TaskError) as error:
        make_task(other, folder, seeds=False, force=True)
    assert str(error.value) == f"{folder / 'reference.py'}: wrong; the folder is as it was"
    assert (folder / "task.toml").read_bytes() == before


def mean_of_kept(x, mask):
    return (x * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def softmax_of_kept(x, mask):
    return torch.softmax(x.masked_fill(mask == 0, -torch.inf), -1)


@pytest.mark.parametrize(("function", "masks"), [(mean_of_kept, "any"), (softmax_of_kept, "some")])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_rows_of_masks_are_drawn_anew(function, masks, dtype):
    """The example's mask is causal, and a kernel may know that."""
    example = torch.randn(96, 64), torch.ones(96, 64).tril().to(dtype)
    draft = make_draft(next(find_rooms(make_operation(function, example))))
    assert draft.masks == masks
    (case,) = (c for c in draft.cpu.check if c.inputs == "masks")
    assert "masks" in draft.cpu.hidden_check[0].fields["inputs"]
    space = {}
    exec(reference_py(draft), space)
    given = Case(name="c", dtype="float32", inputs="masks", **{**case.sizes, "M": 40, "N": 30})
    mask = space["inputs"](given, torch.Generator().manual_seed(3), torch.device("cpu"))["mask"]
    assert (mask.dtype, mask.bool().all(1).any()) == (dtype, True)
    assert bool((mask.sum(1) == 0).any()) is (masks == "any")
    assert not mask.bool().equal(torch.ones(40, 30).tril().bool())


def test_an_argument_that_no_case_varies_is_a_hole(tmp_path, in_process):
    def shifted(x, steps):
        return x * (1 + (steps << 1).sum())  # numbers of any magnitude are no shift

    example = torch.randn(96, 64), torch.zeros(7, dtype=torch.int64)
    made = make_task(make_operation(shifted, example), tmp_path / "t", seeds=False)
    assert "arguments.steps: no other values of it show in any check case" in " ".join(made.holes)


def upper_product(a, b):
    return torch.triu(a @ b)


def upper_inputs():
    return torch.triu(torch.rand(64, 64)), torch.triu(torch.rand(64, 64))


@pytest.mark.nightly
def test_what_algebra_shows_to_be_idle_is_declared(tmp_path, in_process):
    """`triu` of a product of matrices that the example draws upper triangular."""
    made = make_task(make_operation(upper_product, upper_inputs), tmp_path / "t", seeds=False)
    assert made.holes == ()
    (idle,) = made.task.without_effect
    assert "without its triu (its self instead)" in idle.operation
    assert "upper triangular" in idle.reason
    assert all(idle.operation in "".join(c.without_effect) for c in made.checks)


def test_the_reference_is_in_float64_also_where_the_code_names_a_dtype():
    def mixed(x):
        h = x.float()
        return (h * torch.ones(x.shape[-1])).to(torch.bfloat16)

    text = written(traced(mixed, torch.randn(8, 16, dtype=torch.bfloat16)))
    space = {}
    exec(text, space)
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    assert space["reference"](x=x).dtype == torch.float64
    assert torch.equal(space["eager"](x=x), mixed(x))


def luma(image):
    red, green, blue = image.float().unbind(-1)
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (luma, lambda x: luma(SimpleNamespace(float=x.double))),
        (lambda image: image / 3, lambda x: x.double() / 3),
        (lambda image: 0.1 * image, lambda x: 0.1 * x.double()),
        (lambda image: image.int().sqrt(), lambda x: x.double().sqrt()),
        (
            lambda image: torch.where(image > 9, image, 0).exp2(),
            lambda x: (x * (x > 9)).double().exp2(),
        ),
    ],
)
def test_the_reference_is_in_float64_also_where_all_arguments_are_whole_numbers(function, exact):
    image = torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3) * 5
    space = {}
    exec(written(traced(function, image)), space)
    wide = space["reference"](image=image)
    assert wide.dtype == torch.float64
    assert torch.equal(space["eager"](image=image), function(image))
    torch.testing.assert_close(wide, exact(image), rtol=1e-14, atol=0)


def test_whole_numbers_beside_others_become_float64_too_and_else_stay_what_they_are():
    x, i = torch.randn(4, 8), torch.arange(8)
    space = {}
    exec(written(traced(lambda x, i: x * (i / 3), x, i)), space)
    torch.testing.assert_close(
        space["reference"](x=x, i=i), x.double() * (i.double() / 3), rtol=1e-14, atol=0
    )
    text = written(traced(lambda x: x * 3 + 1, i))
    assert "torch.dtype" not in text
    assert ".to(" not in text.partition("def reference")[2]
    text = written(traced(lambda x: torch.view_as_complex(x).abs(), torch.randn(4, 2)))
    assert ".to(" not in text.partition("def reference")[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_to_fewer_bits_stays_and_is_float64_in_the_reference(dtype, cast):
    def function(x):
        return (x * 3).to(cast), x.to(cast).sum(-1).to(x.dtype)

    x = torch.randn(8, 16).to(dtype)
    space = {}
    exec(written(traced(function, x)), space)
    found = space["eager"](x=x)
    assert [t.dtype for t in found] == [cast, dtype]
    assert all(map(torch.equal, found, function(x)))
    assert {t.dtype for t in space["reference"](x=x)} == {torch.float64}


def test_numbers_of_8_bits_alone_have_a_reference_in_float64():
    operation = make_operation(
        lambda x: (x.float() * 3).to(torch.bfloat16),
        lambda: torch.randn(8, 16).to(torch.float8_e4m3fn),
    )
    x, space = torch.randn(8, 16).to(torch.float8_e4m3fn), {}
    exec(written(trace(operation, every_axis(operation))), space)
    assert space["reference"](x=x).dtype == torch.float64
    assert torch.equal(space["eager"](x=x), (x.float() * 3).to(torch.bfloat16))


def summed_by_segment(x, segment):
    return torch.zeros(8, x.shape[1]).index_add_(0, segment, x)


@pytest.mark.parametrize(
    "function",
    [
        summed_by_segment,
        lambda x, i: x * torch.linspace(0, 1, x.shape[1]),
        lambda x, i: x + torch.full((x.shape[1],), 0.1),
        lambda x, i: x + torch.arange(0.1, 16.05, 1.0),
        lambda x, i: torch.where(x > 0, 0.1, 0.2),
        lambda x, i: x + torch.where(i > 2, 0.1, i)[:, None],
        lambda x, i: torch.where(x > 0, x, 0.1),
    ],
)
def test_new_tensors_without_a_dtype_are_float64_in_the_reference(function):
    x, i = torch.randn(8, 16), torch.arange(8) % 5
    space = {}
    found = traced(function, x, i)
    exec(written(found), space)
    given = {found.operation.examples[k].name: (x, i)[k] for k in found.used}
    assert torch.equal(space["eager"](**given), function(x, i))
    torch.set_default_dtype(torch.float64)
    try:
        exact = function(x.double(), i)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(space["reference"](**given), exact, rtol=1e-14, atol=0)


def test_a_gradient_is_a_task():
    operation = make_operation(RMSNorm(16), torch.randn(8, 16), backward=True)
    found = trace(operation, every_axis(operation))
    assert [e.name for e in operation.examples] == ["grad", "x", "weight"]
    assert [r.name for r in found.results] == ["dx", "dweight"]
    space = {}
    exec(written(found), space)
    tensors = [torch.randn(8, 16), torch.randn(8, 16), torch.randn(16)]
    named = dict(zip(["grad", "x", "weight"], tensors, strict=True))
    for mine, its in zip(space["eager"](**named), operation.call(*tensors), strict=True):
        assert torch.allclose(mine, its)


def test_numbers_are_arguments_and_unneeded_tensors_are_not():
    operation = make_operation(
        lambda x, unused, eps: x + eps,
        {"x": torch.randn(8, 9), "unused": torch.randn(50, 60), "eps": 0.5},
    )
    found = trace(operation, every_axis(operation))
    assert found.used == (0,)
    text = task_toml(TaskDraft(found, DraftKind((), ()), DraftKind((), ())))
    assert 'name = "eps"\nvalue = 0.5' in text
    assert "unused" not in text


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x + torch.rand_like(x), "draws random numbers"),
        (lambda x: torch.multinomial(x.softmax(-1), 1), "draws random numbers"),
        (lambda x: x[: int(x.sum())], "depends on a tensor's values, as by .item.*: pass the num"),
        (
            lambda x: F.ctc_loss(x, x[0, :1].long(), x[:1, 0].long(), x[:1, 0].long()),
            r"aten._ctc_loss.Tensor gives tensors whose sizes depend on a tensor's values: write",
        ),
        (
            lambda x: x * x.view(torch.int32),
            r"reinterprets bits \(x.view\(torch.int32\) of torch.fl",
        ),
        (lambda x: None, "returns no tensor, and writes none of its arguments"),
        (lambda x: x + BIG[:16], "holds a tensor"),
    ],
)
def test_what_cannot_be_a_task_is_said(function, expected):
    with pytest.raises(AuthoringError, match=expected):
        written(traced(function, torch.randn(8, 16)))


@pytest.mark.parametrize("function", [lambda i: torch.bincount(i, minlength=9), lambda i: i[i > 3]])
def test_a_size_that_values_decide_is_said(function):
    operation = make_operation(function, torch.arange(64) % 9)
    expected = r"a size depends on a tensor's values, as in x\[mask\], .*: let "
    with pytest.raises(AuthoringError, match=expected):
        next(find_rooms(operation))


def test_bits_of_whole_numbers_may_be_numbers():
    def halves(packed):
        return packed.view(torch.float16).float() * 3

    packed = torch.randn(8, 16).half().view(torch.int16)
    space = {}
    exec(written(traced(halves, packed)), space)
    assert torch.equal(space["eager"](packed=packed), halves(packed))
    assert torch.equal(space["reference"](packed=packed), halves(packed).double())


def rotations(length, width):
    angles = torch.outer(torch.arange(length).float(), 1.0 / 10 ** torch.arange(width).float())
    return torch.polar(torch.ones_like(angles), angles)


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("own", rotations(24, 8))

    def forward(self, x, given):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * given
        return torch.view_as_real(z).flatten(-2), z * self.own[: z.shape[0]]


def test_complex_numbers_are_real_ones_with_a_last_dimension_of_2():
    torch.manual_seed(0)
    module = Rotated()
    operation = make_operation(module, lambda: (torch.randn(24, 16), rotations(24, 8)))
    assert [e.shape for e in operation.examples] == [(24, 16), (24, 8, 2), (24, 8, 2)]
    assert {e.dtype for e in operation.examples} == {torch.float32}
    assert [n.partition(":")[0] for n in operation.notes] == ["given", "own"]
    found = trace(operation, [(0, 0), (1, 0), (2, 0)])
    assert found.results[1].shape == ("M", 8, 2)
    space = {}
    exec(written(found), space)
    x, given, own = torch.randn(24, 16), rotations(24, 8), module.own
    expected = module(x, given)
    parts = {"given": torch.view_as_real(given), "own": torch.view_as_real(own)}
    results = space["reference"](x=x, **parts)
    assert results[1].dtype == torch.float64
    assert torch.allclose(results[0].float(), expected[0])
    assert torch.allclose(results[1].float(), torch.view_as_real(expected[1]))
    case = Case(name="c", dtype="float32", inputs="normal", scale=1.0, **found.dims)
    drawn = space["inputs"](case, torch.Generator(), "cpu")
    assert torch.allclose(drawn["given"], parts["given"])


def looked_up(x, table):
    return table[((x.clamp(-4, 4) + 4) / 8 * (len(table) - 1)).long()]


def chosen_by_sums(x, u):
    sums = x.softmax(-1).cumsum(-1)
    return x.gather(-1, torch.searchsorted(sums, u[:, None]).clamp(max=x.shape[1] - 1))


def test_an_index_that_rounding_decides_is_said():
    def words(function, *inputs):
        return rounded_index(traced(function, *inputs).graph)

    assert "rounding decides an index" in words(looked_up, torch.randn(64, 8), torch.randn(257))
    assert "rounding decides an index" in words(chosen_by_sums, torch.randn(8, 9), torch.rand(8))
    assert words(lambda x, i: x[i + 1], torch.randn(9, 8), torch.arange(8)) == ""
    assert words(lambda x, i: x.long()[i], torch.randn(9, 8), torch.arange(8)) == ""


def step(p, grad, m, momentum=0.9):
    """Momentum, in place."""
    m.mul_(momentum).add_(grad)
    p[:, 1:].sub_(m[:, 1:], alpha=0.1)
    return m.norm(), p


@pytest.mark.nightly
def test_arguments_that_are_written_are_found(tmp_path, in_process):
    inputs = (*torch.randn(3, 96, 64).unbind(), 0.5)
    made = make_task(make_operation(step, inputs), tmp_path / "t", seeds=False)
    task = made.task
    assert made.holes == ()
    assert [r.name for r in task.compared] == ["y", "p", "m"]
    assert task.mutates == ("p", "m")
    assert task.bytes == "(5 * M * N + 1) * itemsize"
    p, grad, m = torch.randn(3, 8, 16).double().unbind()
    expected = [p.clone(), grad, m.clone()]
    norm, _ = step(*expected, momentum=0.5)
    found = task.reference().reference(p=p, grad=grad, m=m, momentum=0.5)
    assert all(map(torch.allclose, found, (norm, expected[0], expected[2])))
    assert not torch.equal(p, expected[0]), "the reference works on copies"
    assert "3 times torch's error" in made_text(made).plain


@pytest.mark.nightly
@dataclass
class Codes:
    """What a user's function returns."""

    codes: torch.Tensor
    about: tuple


def test_a_dataclass_of_tensors_is_a_result():
    found = traced(lambda x: Codes(x * 2, (x.sum(-1), "words")), torch.randn(9, 8))
    assert [r.shape for r in found.results] == [("M", "N"), ("M",)]
    with pytest.raises(AuthoringError, match=r"it gives float, where a tensor was expected, or a"):
        traced(lambda _: 1.5, torch.randn(9, 8))


def averaged(shadow, given, decay=0.9):
    """A moving average of several tensors, in place."""
    torch._foreach_mul_(shadow, decay)
    torch._foreach_add_(shadow, given, alpha=1 - decay)
    return shadow


def test_lists_of_tensors_that_are_written_are_found():
    tensors = torch.randn(2, 96, 64), torch.randn(2, 64)
    found = traced(averaged, [a[0] for a in tensors], [a[1] for a in tensors])
    assert [r.name for r in found.compared] == ["shadow_0", "shadow_1"]
    assert found.work(found.dims) == 2 * (96 * 64 + 64)
    shadow, given = ([a[i].clone() for a in tensors] for i in (0, 1))
    scope = {}
    exec(written(found), scope)
    named = dict(zip(("shadow_0", "shadow_1", "given_0", "given_1"), shadow + given, strict=True))
    results = scope["reference"](**named)
    for mine, s, g in zip(results, shadow, given, strict=True):
        torch.testing.assert_close(mine, 0.9 * s.double() + 0.1 * g.double())


def test_a_copy_of_a_list_that_is_written_stays_a_copy():
    found = traced(lambda x: torch._foreach_mul_([x + 0, x * 1], 2.0) or x + 1, torch.randn(9, 8))
    assert found.written == ()
    copied = traced(lambda a, b: torch._foreach_add([a, b], 1.0)[0] * b, *torch.randn(2, 9, 8))
    assert copied.work(copied.dims) == 3 * 9 * 8


def test_a_task_from_python(tmp_path, in_process, monkeypatch):
    monkeypatch.setattr(new_task, "write_seeds", lambda *_, **__: [])
    made = kagent.Task.of(
        lambda x: 30 * torch.tanh(x / 30),
        torch.randn(48, 64),
        vary={"x:0": "tokens"},
        to=tmp_path / "cap",
        name="soft_cap",
    )
    assert made.signature == "soft_cap(x: Tensor[tokens, 64]) -> Tensor[tokens, 64]"
    assert (made.dims, made.holes) == ({"tokens": 48}, ())
    assert load_task(made.folder).name == "soft_cap"


def test_a_whole_number_in_a_tensor_without_dimensions_is_an_argument(
    tmp_path, in_process, monkeypatch
):
    monkeypatch.setattr(new_task, "write_seeds", lambda *_, **__: [])
    made = kagent.Task.of(
        lambda x, p: x / (p + 1),
        lambda: (torch.randn(48, 64), torch.full((), 7)),
        to=tmp_path / "step",
    )
    assert made.signature == "operation(x: Tensor[M, N], p: Tensor[] int64) -> Tensor[M, N]"


def test_lists_are_written_in_inference_mode():
    @torch.inference_mode()
    def halved(x, y):
        made = [x + 1, y + 1]
        torch._foreach_mul_(made, 0.5)
        return made[0] + made[1]

    assert traced(halved, *torch.randn(2, 9, 8)).written == ()


def test_a_copy_that_is_written_stays_a_copy():
    def function(x):
        y = x * 1
        return y.add_(x)

    found = traced(function, torch.randn(8, 16))
    assert found.written == ()
    space = {}
    exec(written(found), space)
    x = torch.ones(4, 4)
    assert (space["eager"](x=x) == 2).all()
    assert (x == 1).all()


def test_bad_input_is_said():
    with pytest.raises(UserError, match="cannot be made without arguments"):
        make_operation(nn.Linear, torch.randn(4, 4))
    with pytest.raises(UserError, match="missing a required argument"):
        make_operation(lambda x, y: x, (torch.randn(4),))
    with pytest.raises(UserError, match="expected ARG:DIM=NAME"):
        parse_vary(["x=B"])
    operation = make_operation(torch.tanh, (torch.randn(4, 1),))
    with pytest.raises(UserError, match="no tensor of that name"):
        next(find_rooms(operation, {("y", 0): "B"}))
    name = operation.examples[0].name
    with pytest.raises(UserError, match=rf"{name} has dimensions 0 to 1$"):
        next(find_rooms(operation, {(name, 9): "B"}))
    with pytest.raises(UserError, match=r"^K is int, expected a function or nn\.Module"):
        make_operation(3, torch.randn(4, 4), name="K")


def test_drawings_are_read_from_values_and_from_code():
    def words(tensor, **options):
        return observed(tensor, **options).drawing.words()

    assert words(torch.arange(4000).reshape(40, 100) % 7) == "whole numbers from 0 to 6"
    assert words(torch.ones(40, 40).tril()) == "1 in the lower triangle, 0 elsewhere"
    assert words(torch.zeros(8), parameter=True) == "evenly from -0.1 to 0.1"
    generator = torch.Generator().manual_seed(0)
    assert words(torch.randn(9999, generator=generator)).startswith("normal with mean 0 ")
    flags = recorded(lambda: ((torch.rand(8, 9) < 0.1).float(), torch.rand(8, 9) * 2))
    assert [f.drawing.flags for f in flags] == [True, False]
    huge = recorded(lambda: torch.rand(1 << 20, 1 << 20))  # 4 TiB
    assert huge.drawing.words() == "evenly from 0 to 1"


def test_examples_may_draw_with_a_generator_of_their_own():
    def example():
        g = torch.Generator().manual_seed(0)
        scaled = 3 * torch.randn(5, 7, generator=g)
        places = torch.randint(2, 9, (5,), generator=g), torch.randperm(7, generator=g)
        shifted = torch.empty(4).normal_(1, 2, generator=g)
        return torch.rand(5, generator=g), scaled, *places, shifted

    drawn = recorded(example)
    assert drawn[0].drawing.words() == "evenly from 0 to 1"
    assert drawn[2].drawing.words() == "whole numbers from 2 to 8"
    scaled, order, shifted = (drawn_by(drawn[i].drawing) for i in (1, 3, 4))
    assert scaled.shape == (5, 7)
    assert sorted(order.tolist()) == list(range(7))
    assert shifted.shape == (4,)


def test_a_kernelbench_problem_is_an_operation(tmp_path):
    file = tmp_path / "7_Conv2d_BatchNorm_ReLU_.py"
    file.write_text(PROBLEM)
    (tmp_path / "other.py").write_text("x = 1\n")
    assert problem_files([tmp_path]) == [file]
    operation = read_problem(file)
    assert operation.name == "conv2d_batch_norm_re_lu"
    assert any("running statistics" in n for n in operation.notes)
    found = trace(operation, [(0, 0), (0, 2), (0, 3), (1, 0)])
    assert found.shapes[:3] == (("B", 8, "H", "W"), ("B", 1, 1, 1), (16, 8, 3, 3))
    assert found.results[0].shape == ("B", 16, "H - 2", "W - 2")
    text = written(found)
    space = {}
    exec(text, space)
    case = Case(name="c", dtype="float32", B=5, H=9, W=7)
    drawn = space["inputs"](case, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert list(drawn)[:3] == ["x", "sign", "conv_weight"]
    assert set(drawn["sign"].unique().tolist()) == {-1.0, 1.0}
    assert torch.allclose(space["eager"](**drawn), operation.call(*drawn.values()), atol=1e-5)


def test_code_that_counts_elements_draws_other_sizes_and_else_its_values_are_drawn():
    def example():
        angles = torch.arange(64)[:, None] * 100 ** -(torch.arange(32) / 32)
        return torch.randn(64, 32), angles.cos(), torch.arange(8).repeat(8).float()

    operation = make_operation(lambda x, c, d: x * c + d[:, None], example)
    room = next(find_rooms(operation))
    names = dict(zip(room.trace.dims, (16, 8), strict=True))
    draft = TaskDraft(room.trace, DraftKind((), ()), DraftKind((), ()))
    assert [tuple(draw_example(draft, i, names).shape) for i in range(3)] == [
        (16, 8),
        (16, 8),
        (16,),
    ]
    kinds = [e.drawing.words() for e in room.trace.operation.examples]
    assert kinds[1:] == ["as the example's own code draws it", "evenly from 0 to 7"]


def softmax_dropped(x):
    return F.dropout(input=F.dropout1d(x, 0.2).softmax(-1), p=0.1, training=True)


def attention_dropped(x):
    return F.scaled_dot_product_attention(x, x, x, None, 0.1)


@pytest.mark.nightly
@pytest.mark.parametrize("function", [softmax_dropped, attention_dropped])
@pytest.mark.parametrize("backward", [False, True])
def test_dropout_that_a_function_calls_is_left_out(tmp_path, in_process, function, backward):
    operation = make_operation(function, torch.randn(2, 12, 16), backward=backward)
    made = make_task(operation, tmp_path / "t", seeds=False)
    assert made.holes == ()
    assert "dropout is left out: a task's results are no chance" in made.notes


def test_equal_sizes_of_what_was_recorded_are_told_apart():
    operation = make_operation(torch.tanh, lambda: torch.randn(16, 16) * 16 + torch.rand(16, 1))
    found = trace(operation, every_axis(operation))
    space = {}
    exec(written(found), space)
    case = Case(name="c", dtype="float32", M=5, N=9)
    drawn = space["inputs"](case, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert next(iter(drawn.values())).shape == (5, 9)


@pytest.mark.parametrize("recorded", [False, True])
def test_another_order_in_the_examples_memory_is_said(recorded):
    def given():
        wide = torch.randn(6, 20)[:, :8]  # rows with gaps are a task's, too
        return wide, torch.randn(8, 6).t(), torch.randn(8).expand(6, 8), torch.randn(1, 8).t().t()

    operation = make_operation(lambda x, y, z, w: x * y + z * w, given if recorded else given())
    said = [n.partition(":")[0] for n in operation.notes if "another order" in n]
    assert said == ["y", "z"]


def test_what_reduces_one_element_is_left_out():
    found = traced(
        lambda x: (x.sum(1, True).max(1, True)[0] ** 1 + 0).logsumexp(1, True), torch.randn(8, 9)
    )
    assert found.notes == tuple(
        f"aten.{name} over one element is left out" for name in ("max", "logsumexp")
    )
    assert not any(name in written(found) for name in ("max", "pow", "add", "logsumexp"))
