"""Time and memory of the block-recurrent transformer: its gates against one more layer, a peer, lengths, decoding.

`python -m benchmarks.block_recurrent` takes about ten minutes. The peer is PyPI's block-recurrent-transformer-pytorch
0.4.4 (with einops and beartype), which is left out, and said so, where it is not installed.
"""

import importlib.util
import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import in_process, interleaved_ratios, memory_mb, write_results
from hf_recurrence import BlockRecurrentConfig, BlockRecurrentForCausalLM
from hf_recurrence.evaluation import block_recurrent_flops


SHAPE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "window_size": 128,
    "num_states": 128,
    "recurrent_layers": [4],
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
ROWS, LENGTH, ROUNDS = 2, 1024, 9
PROMPT, NEW = 512, 64
LENGTHS = (1024, 4096, 16384, 32768)
SLIDE = "Slide, one more layer"


def build(**changes) -> BlockRecurrentForCausalLM:
    torch.manual_seed(0)
    return BlockRecurrentForCausalLM(BlockRecurrentConfig(**{**SHAPE, **changes}))


def build_peer() -> torch.nn.Module | None:
    if importlib.util.find_spec("block_recurrent_transformer_pytorch") is None:
        return None
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    torch.manual_seed(0)
    return BlockRecurrentTransformer(
        num_tokens=256,
        dim=256,
        depth=6,
        dim_head=64,
        heads=4,
        max_seq_len=LENGTH,
        block_width=128,
        num_state_vectors=128,
        recurrent_layers=(4,),
    )


def training_times() -> dict:
    ids = torch.randint(256, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    models = {SLIDE: build(recurrent_layers=[], num_hidden_layers=7)}
    for kind in ("fixed", "lstm"):
        for gate in ("skip", "dual", "single"):
            models[f"Rec:{kind}:{gate}"] = build(gate_type=kind, gate_config=gate)
    models["Feedback:fixed:skip"] = build(feedback=True)
    models["Feedback:lstm:single"] = build(feedback=True, gate_type="lstm", gate_config="single")

    def step(model: torch.nn.Module) -> None:
        model.train()(ids[:, :-1], shift_labels=ids[:, 1:]).loss.backward()
        model.zero_grad()

    runs = {name: (lambda model=model: step(model)) for name, model in models.items()}
    peer = build_peer()
    if peer is not None:

        def step_peer() -> None:
            loss = peer.train()(ids, return_loss=True)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
            peer.zero_grad()

        runs["peer"] = step_peer
    found = interleaved_ratios(runs, SLIDE, ROUNDS)
    least = block_recurrent_flops(models[SLIDE].config, logits=True)
    for name, model in models.items():
        found[name]["flops_ratio"] = block_recurrent_flops(model.config, logits=True) / least
    return found


def length_times() -> dict:
    """Seconds of a step, and seconds a token against those of the shortest."""
    ids = torch.randint(256, (1, max(LENGTHS) + 1), generator=torch.Generator().manual_seed(0))
    model = build().train()

    def step(length: int) -> None:
        model(ids[:, :length], shift_labels=ids[:, 1 : length + 1]).loss.backward()
        model.zero_grad()

    runs = {str(length): (lambda length=length: step(length)) for length in LENGTHS}
    found = interleaved_ratios(runs, str(LENGTHS[0]), 3)
    for length, value in found.items():
        value["ratio_a_token"] = value["ratio"] * LENGTHS[0] / int(length)
    return found


def generation_times() -> dict:
    prompt = torch.randint(256, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    ours = build().eval()
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_embd=256, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0)
    ).eval()
    greedy = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    runs = {
        "ours": lambda: ours.generate(prompt, **greedy),
        "GPT-2 with its cache": lambda: gpt2.generate(prompt, **greedy),
    }
    peer = build_peer()
    if peer is not None:
        runs["peer"] = lambda: peer.generate(prompt, length=PROMPT + NEW)
    times = interleaved_ratios(runs, "ours", 7)
    sizes, cache = {}, None
    with torch.no_grad():
        for number in range(3000):
            cache = ours(prompt[:, :1], past_key_values=cache, use_cache=True).past_key_values
            if number % 640 == 600:
                sizes[str(number)] = cache.nbytes()
    return {"after_a_prompt_of_512": times, "cache_bytes_at_token": sizes}


def measure(kind: str, length: int) -> dict[str, float]:
    ids = torch.randint(256, (ROWS if kind == "peer" or length == LENGTH else 1, length + 1))
    model = build_peer() if kind == "peer" else build()
    before = memory_mb("VmRSS")
    if kind == "peer":
        loss = model.train()(ids, return_loss=True)
        loss = loss[0] if isinstance(loss, tuple) else loss
    else:
        loss = model.train()(ids[:, :-1], shift_labels=ids[:, 1:]).loss
    loss.backward()
    return {
        "rows": ids.shape[0],
        "peak_mb": memory_mb("VmHWM"),
        "before_mb": before,
    }


def main() -> None:
    results = {"training": training_times(), "generation": generation_times(), "length_times": length_times()}
    results["length_memory"] = {}
    for length in LENGTHS:
        results["length_memory"][str(length)] = in_process("benchmarks.block_recurrent", "ours", length)
    if build_peer() is not None:
        results["peer_memory"] = in_process("benchmarks.block_recurrent", "peer", LENGTH)
    write_results(
        "block_recurrent",
        {**SHAPE, "rows": ROWS, "length": LENGTH, "rounds": ROUNDS, "prompt": PROMPT, "new_tokens": NEW, "seed": 0},
        results,
        {
            "Rec:fixed:skip": "at most 1.00 of Slide with one more layer, the other five 1.08, feedback 1.40",
            "peer": "training at least as slow as Rec:fixed:skip at no less memory, generation at least 15 times",
            "GPT-2 with its cache": "generation at least as slow as ours",
            "flops_ratio": "what the arithmetic alone would give, on whole tiles",
            "length_times, length_memory": "linear",
            "cache_bytes_at_token": "flat",
        },
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
