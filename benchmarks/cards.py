"""The cards of this repository's own checkpoints, in `model_cards/`.

    python -m benchmarks.cards FOLDER REPO_ID   keeps what the card of a checkpoint is made of, and renders it
    python -m benchmarks.cards                  renders all of them again

Weights are not kept. `model_cards/sources/NAME/` has the configuration, the metrics and the recipe of a checkpoint as
its run wrote them, and what was asked for; `model_cards/NAME.md` is the card made of these.
"""

import argparse
import json
from pathlib import Path

from hf_recurrence.publishing import render_card
from hf_recurrence.publishing.card import base_model_of, read_metrics
from hf_recurrence.publishing.files import kind_of, read_config, without_paths


FOLDER = Path(__file__).parent.parent / "model_cards"
KEPT = ("config", "metrics", "recipe")


def keep(folder: Path, repo_id: str, base_model: str | None = None, cards: Path = FOLDER) -> Path:
    """The card of a checkpoint, after what it is made of was copied."""
    read_config(folder)
    records = read_metrics(folder)
    if not records:
        raise ValueError(f"`folder` must have a metrics.json with what was measured, {str(folder)!r} has none.")
    source = cards / "sources" / repo_id.split("/")[-1]
    source.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if kind_of(path.name) in KEPT or path.name == "tokenizer_config.json":
            (source / path.name).write_text(without_paths(path.read_text(encoding="utf-8")), encoding="utf-8")
    asked = {"repo_id": repo_id, "base_model": base_model or base_model_of(folder, records)}
    (source / "card.json").write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")
    card = cards / f"{source.name}.md"
    card.write_text(render(source), encoding="utf-8")
    return card


def render(source: Path) -> str:
    """The card of a kept checkpoint."""
    return render_card(source, **json.loads((source / "card.json").read_text(encoding="utf-8")))


def differing(cards: Path = FOLDER) -> list[str]:
    """The names of cards that are missing, left over, or not what their sources give."""
    made = {source.parent.name: render(source.parent) for source in sorted(cards.glob("sources/*/card.json"))}
    found = {path.stem: path.read_text(encoding="utf-8") for path in cards.glob("*.md")}
    return sorted(name for name in made.keys() | found.keys() if made.get(name) != found.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the cards of this repository's checkpoints.")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("repo_id", nargs="?")
    parser.add_argument("--base-model")
    given = parser.parse_args()
    if given.folder is not None and given.repo_id is None:
        parser.error("FOLDER needs a REPO_ID")
    if given.folder is not None:
        print(keep(given.folder, given.repo_id, given.base_model))
        return
    for source in sorted(FOLDER.glob("sources/*/card.json")):
        (FOLDER / f"{source.parent.name}.md").write_text(render(source.parent), encoding="utf-8")
        print(source.parent.name)


if __name__ == "__main__":
    main()
