"""Time and memory of SRUBert: the scan against a loop, a feed-forward network and a peer; a layer; the whole model.

`python -m benchmarks.sru_bert` takes about ten minutes; with names of parts (scan, peer, layer, model, memory) only
these are measured again. The peer is PyPI's sru 2.6.0, which is left out, and said so, where it is not installed.
`--smoke` times each thing twice and writes nothing.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertLayer

from benchmarks.common import RESULTS, in_process, interleaved_ratios, memory_mb, write_results
from hf_recurrence import SRUBertConfig, SRUBertForMaskedLM
from hf_recurrence.modeling_sru_bert import SRUBertLayer
from hf_recurrence.scan import sru_scan, swish_scan


MODULE = "benchmarks.sru_bert"
SHAPES = ((8, 512, 1024), (1, 128, 768), (4, 2048, 1024))  # rows, length and width of the scan
PASSES = 5  # a step of training runs the scans of all layers one after the other: what counts is a scan after scans
# Of large tensors a good part of all times is the system's, which takes their memory back and gives it again, page by
# page, as the allocator asks for it; how often depends on what ran before. So they are timed as it comes, with an
# allocator that keeps its memory, and so on one thread, since steps this small run on one whatever there is.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
SETTINGS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "memory kept": KEPT,
    "memory kept, one thread": {**KEPT, "OMP_NUM_THREADS": "1"},
}
ROUNDS = {"scan": 11, "short scan": 51, "peer": 9, "layer": 11, "model": 3}
ROWS, LENGTH, WIDTH = 4, 512, 768
PEER = (8, 512, 1024)
LENGTHS = (512, 1024, 2048, 4096)
LOOP, FEED_FORWARD, BERT = "loop over unbind", "feed-forward of equal parameters", "BERT"


def loop(x: torch.Tensor) -> torch.Tensor:
    """The recurrence as one writes it first, without the quadratic cost of indexing."""
    c, states = torch.zeros_like(x[:, 0]), []
    for value in x.unbind(1):
        c = F.silu(c - value) + value
        states.append(c)
    return torch.stack(states, 1)


def step(run: Callable[[torch.Tensor], Any], x: torch.Tensor, passes: int = 1) -> Callable[[], None]:
    """Forward and backward passes; several in a row where what ran before would weigh on the first one's memory."""
    gradient = torch.ones_like(run(x))

    def once() -> None:
        for _ in range(passes):
            x.grad = None
            run(x).backward(gradient)

    return once


def scan_times(rounds: dict[str, int]) -> dict[str, Any]:
    """All shapes in all settings, each setting in a process of its own."""
    given = json.dumps(rounds)
    return {name: in_process(MODULE, "--scan", given, variables=variables) for name, variables in SETTINGS.items()}


def times_of_shapes(rounds: dict[str, int]) -> dict[str, Any]:
    results = {}
    for rows, length, width in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(rows, length, width, requires_grad=True)
        # The block of this inner width stands for a network of 3/2 of it in a model of 3/8 of it: 4 to 1, as BERT's.
        outer, inner = width * 3 // 8, width * 3 // 2
        network = nn.Sequential(nn.Linear(outer, inner), nn.GELU(), nn.Linear(inner, outer))
        runs = {
            LOOP: step(loop, x, PASSES),
            "scan": step(lambda x: swish_scan(x)[0], x, PASSES),
            "scan, 4 steps at once": step(lambda x: swish_scan(x, steps=4)[0], x, PASSES),
            "scan, reverse": step(lambda x: swish_scan(x, reverse=True)[0], x, PASSES),
            FEED_FORWARD: step(network, torch.randn(rows, length, outer, requires_grad=True), PASSES),
        }
        times = interleaved_ratios(runs, "scan", rounds["short scan" if length < 200 else "scan"])
        results[str([rows, length, width])] = {
            "seconds": {name: value["seconds"] / PASSES for name, value in times.items()},
            "loop_over_scan": times[LOOP]["ratio"],
            "scan_over_feed_forward": 1 / times[FEED_FORWARD]["ratio"],
        }
    return results


def peer_times(rounds: dict[str, int]) -> dict[str, Any] | str:
    """The peer in the settings of the scans, each in a process of its own."""
    if importlib.util.find_spec("sru") is None:
        return "not run: sru is not installed"
    given = json.dumps(rounds)
    return {name: in_process(MODULE, "--peer", given, variables=variables) for name, variables in SETTINGS.items()}


def times_of_peer(rounds: dict[str, int]) -> dict[str, Any]:
    """SRU's cell with its projection, gates and highway, and the part behind the projection alone.

    Both sides have the same values, which is tested, and gradients of inputs and weights.
    """
    from sru import SRUCell
    from sru.ops import elementwise_recurrence_naive

    rows, length, width = PEER
    torch.manual_seed(0)
    cell = SRUCell(width, width, rescale=False)
    nn.init.normal_(cell.bias)
    weight, bias = cell.weight_c, cell.bias
    x = torch.randn(rows, length, width, requires_grad=True)
    turned_x = x.detach().transpose(0, 1).contiguous().requires_grad_()
    projection = cell.weight.detach().view(width, width, 3).permute(2, 0, 1).contiguous().requires_grad_()
    u = torch.stack([x @ part for part in projection]).detach().requires_grad_()  # [3, B, T, D]
    turned_u = cell.compute_U(turned_x).detach().requires_grad_()
    start = torch.zeros(rows, width)

    def recurrence(u: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        c, earlier, _ = sru_scan(u[0], u[1] + bias[:width], weight[:width])
        return x + (c - x) * torch.sigmoid(u[2] + weight[width:] * earlier + bias[width:])

    def peers(u: torch.Tensor) -> torch.Tensor:
        values = (u, turned_x, weight, bias, start, 0, width, False, True, None, None, None)
        return elementwise_recurrence_naive(*values)[0]

    def whole(x: torch.Tensor) -> torch.Tensor:
        return recurrence([x @ part for part in projection])

    pairs = {
        "the whole cell": ((whole, x), (lambda x: cell(x)[0], turned_x)),
        "behind the projection": ((recurrence, u), (peers, turned_u)),
    }
    found = {}
    for name, (ours, peer) in pairs.items():
        torch.testing.assert_close(ours[0](ours[1]), peer[0](peer[1]).transpose(0, 1), rtol=1e-3, atol=1e-4)
        times = interleaved_ratios({"ours": step(*ours), "peer": step(*peer)}, "ours", rounds["peer"])
        found[name] = {"peer_over_ours": times["peer"]["ratio"], "seconds": times}
    return found


def layer_times(rounds: dict[str, int]) -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = {
        "swish": {},
        "swish, 2 steps at once": {"recurrence_steps": 2},
        "swish, bidirectional": {"recurrence_direction": "bidirectional"},
        "swish, trained slopes": {"trainable_swish": True},
        "sru": {"recurrence_cell": "sru"},
    }
    torch.manual_seed(0)
    layers = {BERT: BertLayer(BertConfig(attn_implementation="sdpa"), layer_idx=0)}
    for name, changes in cases.items():
        layers[name] = SRUBertLayer(SRUBertConfig(attn_implementation="sdpa", **changes), 0)
    x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)
    runs = {name: step(layer.train(), x) for name, layer in layers.items()}
    runs["swish, with a mask"] = step(lambda x: layers["swish"](x, mask), x)
    return interleaved_ratios(runs, BERT, rounds["layer"])


def model_times(rounds: dict[str, int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > 0.15, -100)
    torch.manual_seed(0)
    models = {
        BERT: BertForMaskedLM(BertConfig()),
        "swish": SRUBertForMaskedLM(SRUBertConfig()),
        "swish, 2 steps at once": SRUBertForMaskedLM(SRUBertConfig(recurrence_steps=2)),
    }

    def encoder(model: nn.Module) -> None:
        model.train().bert(ids).last_hidden_state.sum().backward()
        model.zero_grad()

    def whole(model: nn.Module) -> None:
        model.train()(ids, labels=labels).loss.backward()
        model.zero_grad()

    found = {}
    for name, run in (("encoder", encoder), ("with the masked-LM loss", whole)):
        runs = {key: (lambda model=model, run=run: run(model)) for key, model in models.items()}
        found[name] = interleaved_ratios(runs, BERT, rounds["model"])
    return found


def measure(kind: str, length: int) -> dict[str, float]:
    """Memory of a forward and a backward pass of the scan over 1024 features, or of a loop."""
    x = torch.randn(1, length, 1024, requires_grad=True)
    before = memory_mb("VmRSS")
    (swish_scan(x)[0] if kind == "scan" else loop(x)).sum().backward()
    return {"peak_mb": memory_mb("VmHWM"), "before_mb": before}


def memory_of_lengths(rounds: dict[str, int]) -> dict[str, Any]:
    return {
        kind: {str(length): in_process(MODULE, "--memory", kind, length) for length in LENGTHS}
        for kind in ("scan", "loop")
    }


PARTS = {
    "scan": scan_times,
    "peer": peer_times,
    "layer": layer_times,
    "model": model_times,
    "memory": memory_of_lengths,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all without any")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    kept = RESULTS / "sru_bert.json"
    results = json.loads(kept.read_text())["results"] if given.parts and kept.exists() else {}
    for name in given.parts or PARTS:
        results[name] = PARTS[name](dict.fromkeys(ROUNDS, 2) if given.smoke else ROUNDS)
    if given.smoke:
        print(json.dumps(results, indent=2))
        return
    write_results(
        "sru_bert",
        {
            "scan_shapes": SHAPES,
            "peer_shape": PEER,
            "rows": ROWS,
            "length": LENGTH,
            "width": WIDTH,
            "rounds": ROUNDS,
            "passes": PASSES,
            "seed": 0,
        },
        {name: results[name] for name in PARTS if name in results},
        {
            "loop_over_scan": "at least 2, 3, 2.5",
            "scan_over_feed_forward": "at most 0.08, 0.15, 0.10",
            "peer_over_ours": "at least 3",
            "layer": "swish at most 1.08 of BERT's, the whole model likewise",
            "memory": "linear in length",
        },
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    elif sys.argv[1:2] == ["--peer"]:
        print(json.dumps(times_of_peer(json.loads(sys.argv[2]))))
    elif sys.argv[1:2] == ["--scan"]:
        print(json.dumps(times_of_shapes(json.loads(sys.argv[2]))))
    else:
        main()
