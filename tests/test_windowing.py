"""Window plans as in the paper's section 4.2, and rows with and without pads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrence.windowing import Documents, Rows, Windows, compact_order, full_windows, next_labels, plan_windows


def test_the_papers_example() -> None:
    plan = plan_windows(24, window_size=10, overlap=3)
    assert [(w.start + 1, w.stop) for w in plan] == [(1, 10), (8, 17), (15, 24)]  # t1:10, t8:17, t15:24
    assert [(w.scored + 2, w.stop + 1) for w in plan] == [
        (2, 11),
        (12, 18),
        (19, 25),
    ]  # predicts t2:11, t12:18, t19:25


@pytest.mark.parametrize(
    ("length", "window_size", "overlap", "starts"),
    [
        (0, 4, 0, []),
        (1, 4, 0, [0]),
        (3, 4, 0, [0]),
        (4, 4, 0, [0]),
        (5, 4, 0, [0, 4]),
        (12, 4, 0, [0, 4, 8]),
        (6, 4, 3, [0, 1, 2]),  # one new token a window
        (7, 4, 2, [0, 2, 4]),
        (2, 1, 0, [0, 1]),
    ],
)
def test_golden_plans(length: int, window_size: int, overlap: int, starts: list[int]) -> None:
    assert [window.start for window in plan_windows(length, window_size, overlap)] == starts


@given(st.integers(0, 90), st.integers(1, 12), st.integers(0, 11))
def test_every_token_is_scored_once_and_in_the_earliest_window(length: int, window_size: int, overlap: int) -> None:
    overlap = min(overlap, window_size - 1)
    plan = plan_windows(length, window_size, overlap)
    scored = [token for window in plan for token in range(window.scored, window.stop)]
    assert scored == list(range(length))
    for window in plan:
        assert window.stop - window.start <= window_size
        for token in range(window.scored, window.stop):
            assert next(w for w in plan if w.start <= token < w.stop) is window
    full = [window for window in plan if window.stop - window.start == window_size]
    assert full_windows(length, window_size, overlap) == len(full)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 4, 0), "`length` must be at least 0, got -1"),
        ((5, 0, 0), "`window_size` must be at least 1, got 0"),
        ((5, 4, 4), r"`overlap` must be .* smaller than `window_size` \(4\), got 4"),
        ((5, 4, -1), "`overlap` must be at least 0"),
    ],
)
def test_impossible_plans_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_windows(*arguments)


def test_rank_undoes_order() -> None:
    mask = torch.rand(5, 17) > 0.4
    order, rank = compact_order(mask)
    values = torch.arange(17).expand(5, -1)
    assert torch.equal(values.gather(1, order).gather(1, rank)[mask], values[mask])


def test_labels_of_the_next_real_token() -> None:
    labels = torch.tensor([[10, 11, 12, 13, 14, 15]])
    assert next_labels(labels).tolist() == [[11, 12, 13, 14, 15, -100]]
    mask = torch.tensor([[0, 1, 1, 0, 1, 0]])
    assert next_labels(labels, mask).tolist() == [[-100, 12, 14, -100, -100, -100]]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert next_labels(labels, None, positions).tolist() == [[11, 12, -100, 14, 15, -100]]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_merge_undoes_the_cut_into_windows(data: st.DataObject) -> None:
    """Whatever the rows hold already and whatever is padded: each real column gets its own value back."""
    window_size = data.draw(st.integers(1, 6))
    overlap = data.draw(st.integers(0, window_size - 1))
    num_rows, num_new = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 15))
    held = [data.draw(st.integers(0, window_size - 1)) for _ in range(num_rows)]
    filled = [data.draw(st.integers(0, count)) for count in held]
    bits = [[data.draw(st.booleans()) for _ in range(num_new)] for _ in range(num_rows)]
    mask = data.draw(st.sampled_from([None, torch.tensor(bits)]))
    rows = Rows(window_size, overlap, (num_rows, num_new), torch.device("cpu"), mask, held, filled, exact=True)
    values = torch.arange(1, num_rows * num_new + 1).view(num_rows, num_new)
    aligned = rows.align(values)
    pieces, counted = [], []
    for number in range(len(rows.windows)):
        columns = rows.columns(number)
        run = rows.pick(aligned, columns)
        if isinstance(columns, slice):  # the model puts what the cache holds in front
            missing = (columns.stop - columns.start) - run.shape[1]
            run = torch.nn.functional.pad(run, (missing, 0))
        pieces.append(rows.scored(number, run.unsqueeze(-1)))
        scored = rows.scored_values(number, rows.align(values, fill=-100), fill=-100)
        assert scored.shape == pieces[-1].shape[:2]
        counted += scored[scored != -100].tolist()
    merged = rows.merge(pieces).squeeze(-1)
    assert torch.equal(merged, values if mask is None else values * mask)
    if mask is None:
        assert sorted(counted) == values.flatten().tolist(), "each new token is scored once"


def test_packed_documents_come_apart_and_together() -> None:
    starts = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]).bool()
    mask = torch.tensor([[0, 1, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0]]).bool()
    documents = Documents(starts, mask)
    values = torch.arange(1, 13).view(2, 6)
    assert documents.unpack(values).tolist() == [[2, 3, 0, 0], [4, 6, 0, 0], [7, 8, 9, 10]]
    assert torch.equal(documents.pack(documents.unpack(values.unsqueeze(-1))).squeeze(-1), values * mask)


@pytest.mark.parametrize(("window_size", "overlap"), [(5, 0), (5, 2), (4, 3), (1, 0)])
def test_windows_of_a_padded_row_are_those_of_its_tokens(window_size: int, overlap: int) -> None:
    lengths, width = (0, 1, 4, 5, 6, 11, 14), 14
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths])
    ids = torch.arange(len(lengths) * width).view(len(lengths), width)
    windows = Windows(window_size, overlap, ids.shape, ids.device, mask)
    aligned = windows.align(ids)
    for row, length in enumerate(lengths):
        tokens, plan = ids[row, width - length :], plan_windows(length, window_size, overlap)
        assert windows.existing[row].tolist() == [number < len(plan) for number in range(windows.count)]
        for number, window in enumerate(plan):
            real = windows.tokens(number)[row]
            assert windows.pick(aligned, number)[row][real].tolist() == tokens[window.start : window.stop].tolist()
    outputs = [windows.pick(aligned, number).unsqueeze(-1) for number in range(windows.count)]
    assert torch.equal(windows.merge(outputs).squeeze(-1), ids * mask)
