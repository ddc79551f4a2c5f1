"""Repairing stores: what the reference damages, what interruptions leave, and what stays as it is."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import zarr
from feeding_stores import SMALL_CHUNKS, contents, fields_of
from feeding_structures import make_structures
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data import AtomicDataZarrReader, AtomicDataZarrWriter, repair_store
from nvalchemi_lightning.data.store import check as zarr_check
from nvalchemi_lightning.data.store import swap as zarr_swap
from nvalchemi_lightning.data.store.neighbors import Extent, find_shifts
from nvalchemi_lightning.errors import ConfigurationError, StoreError

HALVES = (4, 5, 3)


def edged_store(path, counts=HALVES):
    """Make a store whose structures have all their atoms in edges, but for a few without edges."""
    data = make_structures(sum(counts), edges=True)
    AtomicDataZarrWriter(path, SMALL_CHUNKS).write(data)
    return zarr.open_group(path, mode="r+"), [fields_of(one) for one in data]


def without_offset(group, counts=HALVES):
    """Store what the reference's append does: atom numbers that begin anew in every appended block."""
    atoms, edges = group["meta/atoms_ptr"][:], group["meta/edges_ptr"][:]
    pairs = group["core/neighbor_list"][:]
    begin = 0
    for count in counts:
        pairs[edges[begin] : edges[begin + count]] -= atoms[begin]
        begin += count
    group["core/neighbor_list"][:] = pairs


def without_renumbering(group, removed=((3, 4), (7, 2))):
    """Store what the reference's defragment does: numbers from before ``removed`` atoms were taken out."""
    edges, pairs = group["meta/edges_ptr"][:], group["core/neighbor_list"][:]
    for sample, atoms in removed:
        pairs[edges[sample] :] += atoms
    group["core/neighbor_list"][:] = pairs


@pytest.mark.parametrize("damage", [without_offset, without_renumbering])
def test_feeding_repair_renumbers_neighbor_lists(tmp_path, damage):
    """The reference's first and second defect."""
    path = tmp_path / "s"
    group, before = edged_store(path)
    damage(group)
    with pytest.raises(StoreError, match=r"core/neighbor_list of sample \d+ has the pair .* repair_store"):
        contents(path)
    with pytest.raises(StoreError, match=r"s is inconsistent. repair_store.*\n  core/neighbor_list: atom numbers of"):
        AtomicDataZarrReader(path).check_integrity()

    dry = repair_store(path, dry_run=True)
    assert not dry.is_sound
    assert "would repair: core/neighbor_list: atom numbers of samples" in str(dry)
    with pytest.raises(StoreError, match="core/neighbor_list"):
        contents(path)

    report = repair_store(path)
    assert report.is_sound
    assert report.found == report.repaired == dry.repaired
    assert "\nrepaired: core/neighbor_list" in str(report)
    assert contents(path) == before
    assert str(repair_store(path)) == f"{path}: nothing is wrong"
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    AtomicDataZarrReader(path).check_integrity()


def test_feeding_repair_refuses_to_guess_edges(tmp_path):
    """An appended structure whose edges leave out its first and last atom fits several answers."""
    path = tmp_path / "s"
    data = make_structures(6, edges=True)
    for one in data:
        del one.neighbor_list
    for one in data:
        one.neighbor_list = torch.zeros(0, 2, dtype=torch.int64)
    large = max(range(6), key=lambda index: data[index].num_nodes)
    data[large].neighbor_list = torch.tensor([[1, 2], [2, 1]])
    AtomicDataZarrWriter(path).write(data)
    group = zarr.open_group(path, mode="r+")
    group["core/neighbor_list"][:] = group["core/neighbor_list"][:] + 1
    # Now 2 and 3 of 5 atoms: still inside; beyond the end it is noticed.
    size = data[large].num_nodes
    group["core/neighbor_list"][:] = group["core/neighbor_list"][:] + size - 3
    report = repair_store(path)
    assert not report.is_sound
    (problem,) = report.remaining
    assert problem.where == "core/neighbor_list"
    assert f"for samples {large} it cannot be told what they were; delete those and repair again" in problem.remedy
    AtomicDataZarrWriter(path).delete(large)
    assert repair_store(path).is_sound


@st.composite
def numbered(draw):
    """Draw sizes, true extents of edges, and blocks."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=14))
    edges = []
    for size in sizes:
        low = draw(st.integers(0, size - 1))
        high = draw(st.integers(low, size - 1))
        edges.append(None if draw(st.integers(0, 4)) == 0 else (low, high) if draw(st.booleans()) else (0, size - 1))
    return np.array(sizes), edges, draw(st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes)))


def check_shifts(ptr, samples, low, high, true):
    found = find_shifts(Extent(np.array(samples), low + true, high + true), ptr)
    if found is None:
        # Nothing lies outside of its structure.
        assert (low + true >= ptr[samples]).all()
        assert (high + true < ptr[np.array(samples) + 1]).all()
        return
    known = ~np.isin(samples, found.unknown)
    assert (found.shifts[known] == -true[known]).all()
    full = (high - low + 1) == np.diff(ptr)[samples]
    assert known[full].all()


@settings(deadline=None, max_examples=200)
@given(numbered(), st.sampled_from(["append", "removal", "any"]))
def test_feeding_found_shifts_are_the_true_ones(drawn, kind):
    """Whatever was damaged in whatever way: a structure is renumbered rightly or said to be unknown."""
    sizes, edges, steps = drawn
    ptr = np.concatenate(([0], np.cumsum(sizes)))
    samples = [index for index, span in enumerate(edges) if span is not None]
    if not samples:
        return
    low = np.array([ptr[index] + edges[index][0] for index in samples])
    high = np.array([ptr[index] + edges[index][1] for index in samples])
    if kind == "append":
        block, bases = 0, []
        for index, step in enumerate(steps):
            block = (ptr[index] if step == 1 else 0 if step == 2 else block) if index else 0
            bases.append(-block)
    else:
        bases = np.cumsum(steps) * (1 if kind == "removal" else 0) + (
            0 if kind == "removal" else np.array(steps) * 3 - 5
        )
    true = np.array([bases[index] for index in samples])
    if kind == "any":
        # No rule behind it: only structures whose edges reach both ends can be known.
        full = [place for place, index in enumerate(samples) if edges[index] == (0, sizes[index] - 1)]
        samples, low, high, true = [samples[place] for place in full], low[full], high[full], true[full]
        if not samples:
            return
    check_shifts(ptr, samples, low, high, true)


# Short arrays, tails, markers and masks -------------------------------------------------------------------------


def test_feeding_repair_fills_short_arrays_if_told_to(tmp_path):
    """The reference's third defect: where the missing rows belong is not recorded, so it is not guessed."""
    path = tmp_path / "s"
    _, before = edged_store(path, (8,))
    group = zarr.open_group(path, mode="r+")
    atoms = int(group["meta/atoms_ptr"][5])
    group["core/energy"].resize((5, 1))
    group["core/forces"].resize((atoms, 3))
    with pytest.raises(StoreError, match=r"core/energy has 5 rows but 8 samples need 8; .* repair_store"):
        AtomicDataZarrReader(path, fields=["energy"]).read_batch([0])
    cautious = repair_store(path)
    assert cautious.repaired == ()
    assert [problem.where for problem in cautious.remaining] == ["core/energy", "core/forces"]
    assert "the rows are those of the first 5 samples: repair_store(..., fill_short=True)" in str(cautious)
    report = repair_store(path, fill_short=True)
    assert report.is_sound
    found = contents(path)
    assert found[:5] == before[:5]
    assert all({"energy", "forces"}.isdisjoint(data) for data in found[5:])
    assert [data["positions"] for data in found] == [data["positions"] for data in before]


def test_feeding_repair_says_what_it_cannot_fill(tmp_path):
    path = tmp_path / "s"
    group, _ = edged_store(path, (8,))
    AtomicDataZarrWriter(path).add_custom("kind", torch.arange(8), "system")
    ptr = group["meta/atoms_ptr"][:]
    group["core/forces"].resize((next(rows for rows in range(ptr[-1]) if rows not in ptr), 3))
    group["custom/kind"].resize((3,))
    (path / "core" / "energy" / "c" / "0" / "0").write_bytes(b"short")
    numbers = group["core/atomic_numbers"]
    numbers[0] = 0
    report = repair_store(path, fill_short=True)
    assert report.repaired == ()
    text = str(report)
    assert "core/forces: has" in text
    assert "and the rows are not those of whole structures" in text
    assert "custom/kind: has 3 rows but 8 samples need 8: structures were appended without it; no value of it" in text
    assert "core/energy: rows 0 to 7 of core/energy cannot be decoded" in text
    assert "core/atomic_numbers: samples 0 have atomic numbers below 1" in text


def test_feeding_repair_cuts_off_unfinished_appends(store):
    before = contents(store)
    marker = dict(zarr.open_group(store, mode="r").attrs)
    AtomicDataZarrWriter(store).append(make_structures(5))
    group = zarr.open_group(store, mode="r+")
    group.attrs.put(marker)
    with pytest.raises(StoreError, match="meta/samples_mask: has 25 rows but the 20 samples that count need 20"):
        AtomicDataZarrReader(store).check_integrity()
    report = repair_store(store)
    assert report.is_sound
    assert {problem.where for problem in report.repaired} >= {"meta/samples_mask", "meta/atoms_ptr", "core/positions"}
    assert zarr.open_group(store, mode="r")["meta/samples_mask"].shape == (20,)
    assert contents(store) == before


@pytest.mark.parametrize("marker", [None, "many", -1])
def test_feeding_repair_sets_the_number_of_samples(store, marker):
    before = contents(store)
    group = zarr.open_group(store, mode="r+")
    if marker is None:
        del group.attrs["num_samples"]
    else:
        group.attrs["num_samples"] = marker
    report = repair_store(store)
    assert report.is_sound
    assert "num_samples: is" in str(report)
    assert zarr.open_group(store, mode="r").attrs["num_samples"] == 20
    assert contents(store) == before


def test_feeding_repair_does_not_lose_samples_that_are_not_there(store):
    zarr.open_group(store, mode="r+").attrs["num_samples"] = 30
    report = repair_store(store)
    assert [str(problem) for problem in report.remaining] == [
        "num_samples: says 30 but meta/samples_mask has only 20 samples; restore the store from a copy"
    ]
    group = zarr.open_group(store, mode="r+")
    group.attrs["num_samples"] = 20
    group["meta/atoms_ptr"][3] = 0
    assert "meta/atoms_ptr does not ascend from 0" in str(repair_store(store))


def test_feeding_repair_finishes_deletions(store):
    AtomicDataZarrWriter(store).delete([4, 5])
    group = zarr.open_group(store, mode="r+")
    group["meta/atoms_mask"][:] = True
    shutil.rmtree(store / "meta" / "edges_mask")
    report = repair_store(store)
    assert report.is_sound
    assert [problem.where for problem in report.repaired] == ["meta/atoms_mask", "meta/edges_mask"]
    ptr = group["meta/atoms_ptr"][:]
    mask = zarr.open_group(store, mode="r")["meta/atoms_mask"][:]
    assert np.flatnonzero(~mask).tolist() == list(range(ptr[4], ptr[6]))


@pytest.mark.parametrize("name", ["mixed32.zarr", "mols16_zstd_append.zarr", "solids_edges_custom.zarr"])
def test_feeding_repair_finds_nothing_in_what_the_reference_wrote(shared, name):
    report = repair_store(shared / "samples" / name, dry_run=True)
    assert report.found == ()
    assert report.is_sound
    AtomicDataZarrReader(shared / "samples" / name).check_integrity()


# What operations leave beside a store ---------------------------------------------------------------------------


def hidden(store, kind, letter="0"):
    return store.with_name(f".{store.name}.{letter * 32}.{kind}")


def test_feeding_repair_fetches_a_store_from_its_hidden_name(store):
    before = contents(store)
    shutil.copytree(store, hidden(store, "partial"))
    store.rename(hidden(store, "old"))
    with pytest.raises(FileNotFoundError, match=r"there is no Zarr store .*, but .twenty.zarr.0+.old beside it"):
        AtomicDataZarrReader(store)
    dry = repair_store(store, dry_run=True)
    assert "is the store: replacing it was interrupted; renamed back" in str(dry)
    assert not store.exists()
    report = repair_store(store)
    assert report.is_sound
    assert report.repaired == dry.repaired
    assert contents(store) == before
    assert [entry.name for entry in store.parent.iterdir()] == [store.name]


def test_feeding_repair_removes_remains(store):
    before = contents(store)
    for letter in "ab":
        shutil.copytree(store, hidden(store, "old", letter))
    hidden(store, "partial").mkdir()
    mine = [store.with_name(".twenty.zarr.mine.partial"), store / "core" / "mine.partial"]
    mine[0].mkdir()
    mine[1].write_text("")
    (store / "core" / "energy" / "c" / f"0.{'0' * 32}.partial").write_text("")
    assert len(repair_store(store).repaired) == 4
    assert contents(store) == before
    assert sorted(store.parent.iterdir()) == sorted([mine[0], store])
    assert mine[1].exists()
    assert not list((store / "core" / "energy").rglob("*.partial"))


def test_feeding_repair_after_an_interrupted_write(tmp_path):
    AtomicDataZarrWriter(tmp_path / ".s.00000000000000000000000000000000.partial").write(make_structures(2))
    report = repair_store(tmp_path / "s")
    assert "did not finish" in str(report)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match=r"there is no Zarr store at .*s, nor remains of one"):
        repair_store(tmp_path / "s")
    with pytest.raises(FileNotFoundError, match="nor remains of one"):
        repair_store(tmp_path / "no" / "folder")
    with pytest.raises(ConfigurationError, match="<dict> is not a local folder; copy the store into one"):
        repair_store({})
    with pytest.raises(StoreError, match="is not a Zarr group"):
        repair_store(tmp_path)


def test_feeding_repair_replaces_a_store_by_a_checked_copy_alone(tmp_path, monkeypatch):
    path = tmp_path / "s"
    group, _ = edged_store(path)
    without_offset(group)
    damaged = group["core/neighbor_list"][:].tolist()
    monkeypatch.setattr(zarr_check, "_renumberer", lambda *_: lambda _: None)
    with pytest.raises(StoreError, match=r"s: repairing it did not help: core/neighbor_list: atom numbers of samples"):
        repair_store(path)
    assert zarr.open_group(path, mode="r")["core/neighbor_list"][:].tolist() == damaged
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


def test_feeding_repair_shares_files_that_stay(tmp_path):
    """The copy that is repaired costs the space of what changes; the rest is linked, or copied where links fail."""
    path = tmp_path / "s"
    group, before = edged_store(path)
    without_offset(group)
    kept = path / "core" / "positions" / "c" / "0" / "0"
    number = kept.stat().st_ino
    repair_store(path)
    assert kept.stat().st_ino == number
    assert kept.stat().st_nlink == 1
    without_offset(group)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zarr_swap.os, "link", no_links)
        assert repair_store(path).is_sound
    assert kept.stat().st_ino != number
    assert contents(path) == before


def no_links(*_):
    raise OSError("links are not supported")


def test_feeding_short_pointers_are_named(store):
    zarr.open_group(store, mode="r+")["meta/edges_ptr"].resize((15,))
    with pytest.raises(StoreError, match=r"meta/edges_ptr is shorter than 20 samples need; repair_store"):
        len(AtomicDataZarrReader(store))
    assert "num_samples: says 20 but meta/edges_ptr has only 14 samples" in str(repair_store(store, dry_run=True))
