"""Describes GPUs and their links: published figures, and the fraction of these figures reached in
measurements. Torch-free."""

from __future__ import annotations

import math
from typing import NamedTuple

GIB = 2**30
# Shares of the published peaks measured at the start of runs on H200s and H100s
# (stages/ppo/measured/roofline.py): for a large bf16 matrix product (770 of 989 TFLOP/s) and a large copy
# (4.3 of 4.8 TB/s, 3.0 of 3.35).
MATRIX = 0.778
COPY = 0.896
LINK = 0.8  # of NVLink and the network in a large collective: assumed, not measured in any record


class GpuSpecs(NamedTuple):
    """Figures from the manufacturer's data sheet: GiB available to a process, dense bf16 FLOP/s, and the
    bytes/s of memory, of NVLink in one direction (PCIe without NVLink), and of the link to the host."""

    memory: float
    flops: float
    bandwidth: float
    link: float
    host: float


# NVIDIA's data sheets for the SXM modules. A800 and H800 are A100 and H100 with slower NVLink.
PUBLISHED = {
    "a100": GpuSpecs(79.2, 312e12, 2.04e12, 300e9, 32e9),
    "a800": GpuSpecs(79.2, 312e12, 2.04e12, 200e9, 32e9),
    "h100": GpuSpecs(79.2, 989.4e12, 3.35e12, 450e9, 64e9),
    "h800": GpuSpecs(79.2, 989.4e12, 3.35e12, 200e9, 64e9),
    "h200": GpuSpecs(139.8, 989.4e12, 4.8e12, 450e9, 64e9),
}


class Gpu(NamedTuple):
    """A GPU: its memory in bytes; FLOP/s of bf16 matrix products and bytes/s of memory, as measured rather
    than as published; bytes/s in one direction from it to other GPUs in the node (`link`), to the host, and
    from its node to other nodes (`network`); and the number of GPUs per node."""

    memory: float = 139.8 * GIB
    flops: float = 770e12
    bandwidth: float = 4.3e12
    link: float = 450e9 * LINK
    host: float = 64e9 * LINK
    network: float = 50e9 * LINK
    per_node: int = 8

    def __str__(self) -> str:
        return (
            f"{self.memory / GIB:.0f} GiB, {self.flops / 1e12:.0f} TFLOP/s and {self.bandwidth / 1e12:.1f}"
            " TB/s a GPU"
        )


def _of(sold: GpuSpecs) -> Gpu:
    flops = MATRIX * sold.flops
    bandwidth = COPY * sold.bandwidth
    return Gpu(
        sold.memory * GIB, round(flops, -13), round(bandwidth, -11), LINK * sold.link, LINK * sold.host
    )


GPUS = {name: _of(sold) for name, sold in PUBLISHED.items()}


def on_nodes(gpu: Gpu, gpus: int, nodes: int | None, network: float | None) -> Gpu:
    """Returns the GPU in nodes of `gpus / nodes` each, connected with `network` bytes/s per node, as
    published.

    Raises ValueError when the number of GPUs is not divisible by the number of nodes.
    """
    if nodes is not None and gpus % nodes:
        raise ValueError(
            f"--nodes {nodes}: {gpus} GPUs do not divide by it; give the nodes that have equally many of them"
        )
    placed = gpu if nodes is None else gpu._replace(per_node=gpus // nodes)
    return placed if network is None else placed._replace(network=LINK * network)


def gather_seconds(count_bytes: float, ranks: int, gpu: Gpu) -> float:
    """Returns the seconds that each of `ranks` GPUs needs to gather `count_bytes` that are split across all
    of them, or to reduce and split as many bytes.

    A ring sends (n - 1) / n of the bytes over each link (Thakur et al. 2005, section 4.1). A ring across
    nodes enters and leaves each node once, so the network link of each node carries these bytes too. The
    slower link determines the time.
    """
    if ranks < 2:
        return 0.0
    sent = count_bytes * (ranks - 1) / ranks
    return max(sent / gpu.link, sent / gpu.network if nodes_of(ranks, gpu) > 1 else 0.0)


def nodes_of(ranks: int, gpu: Gpu) -> int:
    """Returns the number of nodes for this many ranks with one GPU each."""
    return math.ceil(ranks / gpu.per_node)
