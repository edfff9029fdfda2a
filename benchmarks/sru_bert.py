"""Time and memory of SRUBert: the scan against a loop, a feed-forward network and a peer; a layer; the whole model.

`python -m benchmarks.sru_bert` takes about fifteen minutes. The peer is PyPI's sru 2.6.0, which is left out, and said
so, where it is not installed. `--smoke` times each thing twice and writes nothing.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertLayer

from benchmarks.common import in_process, interleaved_ratios, memory_mb, write_results
from hf_recurrence import SRUBertConfig, SRUBertForMaskedLM
from hf_recurrence.modeling_sru_bert import SRUBertLayer
from hf_recurrence.scan import sru_scan, swish_scan


SHAPES = ((8, 512, 1024), (1, 128, 768), (4, 2048, 1024))  # rows, length and width of the scan
PASSES = 5
ROUNDS = {"scan": 11, "short scan": 51, "layer": 15, "model": 5}
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
    """SRU's recurrence with its gates and highway, after the projection; outputs are compared first."""
    if importlib.util.find_spec("sru") is None:
        return "not run: sru is not installed"
    from sru.ops import elementwise_recurrence_naive

    rows, length, width = PEER
    torch.manual_seed(0)
    x, u = torch.randn(rows, length, width), torch.randn(3, rows, length, width, requires_grad=True)
    weight, bias = torch.randn(2 * width), torch.randn(2 * width)
    turned = u.detach().permute(2, 1, 3, 0).reshape(length, rows, 3 * width).requires_grad_()
    start, before = torch.zeros(rows, width), x.transpose(0, 1).contiguous()

    def ours(u: torch.Tensor) -> torch.Tensor:
        c, earlier, _ = sru_scan(u[0], u[1] + bias[:width], weight[:width])
        return x + (c - x) * torch.sigmoid(u[2] + weight[width:] * earlier + bias[width:])

    def peer(u: torch.Tensor) -> torch.Tensor:
        return elementwise_recurrence_naive(u, before, weight, bias, start, 0, width, False, True, None, None, None)[0]

    torch.testing.assert_close(ours(u), peer(turned).transpose(0, 1), rtol=1e-3, atol=1e-4)
    runs = {"ours": step(ours, u), "peer": step(peer, turned)}
    times = interleaved_ratios(runs, "ours", rounds["scan"])
    return {"shape": list(PEER), "peer_over_ours": times["peer"]["ratio"], "seconds": times}


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


def main() -> None:
    smoke = "--smoke" in sys.argv
    rounds = dict.fromkeys(ROUNDS, 2) if smoke else ROUNDS
    results = {
        "scan": scan_times(rounds),
        "peer": peer_times(rounds),
        "layer": layer_times(rounds),
        "model": model_times(rounds),
        "memory": {
            kind: {str(length): in_process("benchmarks.sru_bert", kind, length) for length in LENGTHS}
            for kind in ("scan", "loop")
        },
    }
    if smoke:
        print(json.dumps(results, indent=2))
        return
    write_results(
        "sru_bert",
        {
            "scan_shapes": SHAPES,
            "rows": ROWS,
            "length": LENGTH,
            "width": WIDTH,
            "rounds": ROUNDS,
            "passes": PASSES,
            "seed": 0,
        },
        results,
        {
            "loop_over_scan": "at least 2, 3, 2.5",
            "scan_over_feed_forward": "at most 0.08, 0.15, 0.10",
            "peer_over_ours": "at least 3",
            "layer": "swish at most 1.08 of BERT's, the whole model likewise",
            "memory": "linear in length",
        },
    )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
