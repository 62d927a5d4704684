"""Facts about a device for a kernel's author: limits, rates, instructions.

Device facts say what was found on the run's machine; the rest follows from the architecture and
stands here (sources: "Technical Specifications per Compute Capability" and "Arithmetic
Instructions" of the CUDA programming guide, data sheets, the PTX manual; what has which instruction
was tried with NVRTC's ptxas).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.target import Target, parse_target

REGISTER_UNIT = 256  # registers are given to a warp in multiples of this
SUBPARTITIONS = 4  # of a multiprocessor, each with a quarter of its registers
RESERVED_SHARED_BYTES = 1024  # of each block, since sm_80


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts about a compute capability beyond `kagent_sandbox.data.target`."""

    generation: str
    blocks: int  # resident on a multiprocessor
    fma_per_clock: int  # fp32, of a multiprocessor
    matrix_per_clock: int  # bf16 and fp16 operations of its tensor cores, dense; 0: not stated
    has: str
    products: str  # of use for matrix products alone
    lacks: str


_AMPERE = "cp.async (16 bytes per thread to shared memory, in the background), packed bf16x2 fma"
_AMPERE_PRODUCTS = "ldmatrix, mma.sync.m16n8k16 on bf16 and fp16 with fp32 accumulators"
_HOPPER = (
    "bulk copies to and from shared memory (cp.async.bulk) with mbarriers, clusters of up to 8 "
    "blocks (16 where the GPU allows it) with distributed shared memory, programmatic dependent "
    "launch, cp.async, packed bf16x2 fma"
)
_HOPPER_PRODUCTS = "tensor maps (TMA), ldmatrix, mma.sync, ex2.approx and tanh.approx on bf16x2"
_WGMMA = "wgmma (warp groups of 128 threads, m64nNk16, B and optionally A from shared memory), "
_TCGEN05 = "tcgen05.mma on 256 KiB of tensor memory (Triton's tl.dot uses it), no wgmma; "
_NO_HOPPER = "bulk copies, clusters, programmatic dependent launch, loads over 16 bytes"
_BLACKWELL = "loads and stores of 32 bytes (ld.global.v8.f32), packed fp32 (fma.rn.f32x2), "
_NO_BLACKWELL = "loads over 16 bytes, packed fp32"

ARCHITECTURES: Mapping[int, Architecture] = {
    80: Architecture("Ampere", 32, 64, 2048, _AMPERE, _AMPERE_PRODUCTS, _NO_HOPPER),
    86: Architecture("Ampere", 16, 128, 1024, _AMPERE, _AMPERE_PRODUCTS, _NO_HOPPER),
    87: Architecture("Ampere", 16, 128, 1024, _AMPERE, _AMPERE_PRODUCTS, _NO_HOPPER),
    89: Architecture("Ada", 24, 128, 1024, _AMPERE, _AMPERE_PRODUCTS, _NO_HOPPER),
    90: Architecture(
        *("Hopper", 32, 128, 4096, _HOPPER + ", setmaxnreg"),
        *(_WGMMA + _HOPPER_PRODUCTS, _NO_BLACKWELL),
    ),
    100: Architecture(
        *("Blackwell", 32, 128, 8192, _BLACKWELL + _HOPPER),
        *(_TCGEN05 + _HOPPER_PRODUCTS, "loads over 32 bytes"),
    ),
    103: Architecture(
        *("Blackwell Ultra", 32, 128, 8192, _BLACKWELL + _HOPPER),
        *(_TCGEN05 + _HOPPER_PRODUCTS, "loads over 32 bytes"),
    ),
    120: Architecture(
        *("Blackwell (consumer)", 24, 128, 0, _BLACKWELL + _HOPPER),
        *("no wgmma, no tcgen05: " + _HOPPER_PRODUCTS, "loads over 32 bytes"),
    ),
}
_CLUSTERS = {
    (90, 132): (
        "clusters: the 132 SMs lie in groups of 14 to 18 that differ from chip to chip, and a "
        "cluster lies in one of them: at one block per SM 66 of 2 run at once, some 32 of 4, 15 "
        "of 8, 7 of 16. Where a fixed grid of clusters has a few more than that, they run in a "
        "second round, which doubles the time: a counter for the next item makes them harmless"
    )
}
"""Most clusters by capability and multiprocessors. They follow from the possible groups of
multiprocessors, and from one H100 that was mapped (accel-sim/gpu-app-collection#87), where clusters
of 8 blocks used 120 of them.
"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, found or typical. `measured` says whether ceilings are the device's own."""

    name: str
    target: Target
    architecture: Architecture | None  # None: a CPU
    found: bool  # the run's device, not its architecture's usual one
    units: int  # multiprocessors, or cores
    l2_bytes: int  # second-level cache of a GPU, last-level cache of a CPU; 0: not known
    memory_bytes: int
    theoretical_gb_per_s: float  # 0: not known
    ceilings: Ceilings | None

    @property
    def is_cpu(self) -> bool:
        """Whether kernels run on the host's processor."""
        return self.target.is_cpu

    @property
    def clusters(self) -> str:
        """Return how many clusters run at once, where that is known."""
        return _CLUSTERS.get((self.target.capability, self.units), "")

    @property
    def peak_tflop_per_s(self) -> float:
        """Dense bf16 products at the usual clock, by the data sheet; 0 where not stated."""
        if self.architecture is None:
            return 0.0
        per_clock = self.architecture.matrix_per_clock
        return self.units * per_clock * self.target.clock_khz / 1e9

    def residency(self, threads: int, registers: int, shared_bytes: int) -> Residency:
        """Return how many blocks of a kernel a multiprocessor holds at once, and their limit."""
        assert self.architecture is not None
        warps = max(1, -(-threads // 32))
        per_warp = -(-max(registers, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
        quarter = self.target.registers_per_multiprocessor // SUBPARTITIONS
        limits = {
            "registers": quarter // per_warp * SUBPARTITIONS // warps,
            "shared memory": self.target.shared_per_multiprocessor
            // (shared_bytes + RESERVED_SHARED_BYTES),
            "threads": self.target.threads_per_multiprocessor // 32 // warps,
            "blocks": self.architecture.blocks,
        }
        blocks = min(limits.values())
        scarce = tuple(n for n, most in limits.items() if most == blocks)
        return Residency(
            blocks, blocks * warps, self.target.threads_per_multiprocessor // 32, scarce
        )


@dataclass(frozen=True, slots=True)
class Residency:
    """Blocks and warps that a multiprocessor holds, of how many, and the scarce resources."""

    blocks: int
    warps: int
    most_warps: int
    limits: tuple[str, ...]


def hardware(target: str, facts: DeviceFacts | None, ceilings: Ceilings | None) -> Hardware:
    """The run's device, or the usual one of an architecture where there are no facts.

    Raises:
        UserError: The target is unknown.
    """
    known = parse_target(target, facts.device if facts else None)
    usual_gb_per_s = 2 * known.memory_clock_khz * 1e3 * known.memory_bus_bits / 8 / 1e9
    return Hardware(
        name=facts.name if facts else known.device_name,
        target=known,
        architecture=ARCHITECTURES.get(known.capability),
        found=facts is not None,
        units=facts.units if facts else (0 if known.is_cpu else known.multiprocessors),
        l2_bytes=facts.l2_bytes if facts else known.l2_bytes,
        memory_bytes=facts.memory_bytes if facts else known.memory_bytes,
        theoretical_gb_per_s=facts.theoretical_gb_per_s if facts else usual_gb_per_s,
        ceilings=ceilings,
    )
