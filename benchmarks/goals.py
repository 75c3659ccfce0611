"""Goals that were set for the kernels in advance, on an H200. The results page shows which were missed."""

from __future__ import annotations

#: Name of the comparison in the tables -> baseline -> baseline's time divided by ours, geometric mean over
#: graphs.
SPEED_UPS: dict[str, dict[str, float]] = {
    **{
        f"flashsparse, forward, {dtype}, F = {width}": {"cuSPARSE": speed, "FlashSparse fp16": 1.75}
        for dtype in ("float16", "bfloat16")
        for width, speed in ((64, 3.7), (128, 2.5))
    },
    **{
        f"the faster of csr and flashsparse, forward, float32, F = {width}": {"RoDe fp32": 1.15}
        for width in (64, 128)
    },
    **{f"auto, float16, F = {width}": {"the fastest stored": 1.8} for width in (32, 128)},
    "attention@1x64 forward, float16": {"Fused3S fp16": 3.5, "turbo-gnn fp16": 3.3},
    "attention@1x128 forward, float16": {"Fused3S fp16": 2.3, "turbo-gnn fp16": 2.3},
    "attention@4x32 forward, float16": {"turbo-gnn fp16": 6.0},
    "attention@1x64 backward, float16": {"DF-GNN fp32": 4.5, "turbo-gnn fp16": 2.6},
    "attention@4x32 backward, float16": {"turbo-gnn fp16": 5.0},
    "additive_attention@1x64 forward, float16": {"DF-GNN fp32": 2.5},
    "additive_attention@1x64 backward, float16": {"DF-GNN fp32": 5.0},
    "gatv2_attention@4x32 forward, float16": {"turbo-gnn fp16": 3.0},
    "gatv2_attention@4x32 backward, float16": {"turbo-gnn fp16": 4.0},
    **{
        f"forward, float32, k = {k}": {"MaxK fp32": 2.5, "DecoupledSSD (re-implemented) fp32": 1.9}
        for k in (8, 16, 32, 64)
    },
    **{f"backward, float32, k = {k}": {"MaxK fp32": 1.8} for k in (16, 32)},
}

#: (model, type) -> graph -> milliseconds that a training step may take
STEPS_MS: dict[tuple[str, str], dict[str, float]] = {
    ("gcn3-128", "bf16-amp"): {"ogbn-arxiv": 2.5, "yelp": 9, "reddit": 35, "ogbn-products": 60},
    ("gat3-4x32", "bf16-amp"): {"ogbn-arxiv": 5, "yelp": 25},
    ("gt3-4x32", "bf16-amp"): {"ogbn-arxiv": 6, "yelp": 25},
    ("gatv2-3-4x32", "bf16-amp"): {"ogbn-arxiv": 12, "yelp": 40},
}

#: The selection of the k largest: speed-up over torch.topk, and share of the bandwidth of a copy.
MAXK_OVER_TOPK, MAXK_OF_COPY = 3.0, 0.7


def verdict(reached: bool, wanted: str) -> str:
    """A goal as the tables show it."""
    return wanted if reached else f"{wanted}: missed"
