"""Any sequence of operations on a store equals the same on a list in memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from feeding_stores import fields_of
from feeding_structures import make_structures
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from zarr.codecs import ZstdCodec

from nvalchemi_lightning.data import AtomicData, AtomicDataZarrReader, AtomicDataZarrWriter, repair_store
from nvalchemi_lightning.data.store.layout import ZarrArrayConfig, ZarrWriteConfig

CONFIGS = (
    ZarrWriteConfig(chunk_bytes=64, block_size=3),
    ZarrWriteConfig(core=ZarrArrayConfig(compressors=ZstdCodec(), chunk_size=7)),
    ZarrWriteConfig(core=ZarrArrayConfig(chunk_size=2, shard_size=6), block_size=2),
)


class StoreMachine(RuleBasedStateMachine):
    """A store beside a list; None stands for what was deleted."""

    @initialize(count=st.integers(1, 6), seed=st.integers(0, 99), edges=st.booleans(), config=st.sampled_from(CONFIGS))
    def write(self, count, seed, edges, config):
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "s"
        self.edges = edges
        self.customs = 0
        self.writer = AtomicDataZarrWriter(self.path, config)
        self.expected: list[AtomicData | None] = make_structures(count, seed=seed, edges=edges)
        self.writer.write(self.expected)

    @rule(count=st.integers(1, 5), seed=st.integers(0, 99), labels=st.booleans(), extra=st.booleans())
    def append(self, count, seed, labels, extra):
        new = make_structures(count, seed=seed, edges=self.edges, labels=labels)
        for one in new if extra else ():
            one.add_node_property("spin_density", torch.ones(one.num_nodes, 2) * seed)
        self.writer.append(new)
        self.expected += new

    @precondition(lambda self: self.customs < 3)
    @rule(level=st.sampled_from(["atom", "edge", "system"]), double=st.booleans())
    def add_custom(self, level, double):
        if level == "edge":
            # Edge fields cannot be missing in what is appended later.
            level = "system"
        sizes = {"atom": self.sizes("node"), "system": np.ones(len(self.expected), dtype=np.int64)}[level]
        rows = torch.arange(float(sizes.sum()), dtype=torch.float64 if double else torch.float32)
        name = f"custom{self.customs}"
        self.customs += 1
        self.writer.add_custom(name, rows, level)
        for data, part in zip(self.expected, rows.split(sizes.tolist()), strict=True):
            if data is not None:
                (data.add_node_property if level == "atom" else data.add_system_property)(name, part)

    def sizes(self, level):
        reader = AtomicDataZarrReader(self.path)
        return reader._here.sizes(level, np.arange(reader.num_samples))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def delete(self, data):
        gone = data.draw(st.lists(st.integers(0, len(self.expected) - 1), max_size=4))
        self.writer.delete(gone)
        for index in gone:
            self.expected[index] = None

    @rule(config=st.sampled_from([None, *CONFIGS]))
    def defragment(self, config):
        self.writer.defragment(config)
        self.expected = [data for data in self.expected if data is not None]

    @rule()
    def repair(self):
        assert repair_store(self.path).found == ()

    @invariant()
    def reads_what_is_expected(self):
        kept = [data for data in self.expected if data is not None]
        for cache_bytes in (0, 300, 2**20):
            reader = AtomicDataZarrReader(self.path, cache_bytes=cache_bytes)
            assert len(reader) == len(kept)
            if not kept:
                continue
            order = np.random.default_rng(len(kept)).permutation(len(kept))
            for found, index in zip(reader.read_batch(order).to_data_list(), order, strict=True):
                assert fields_of(found) == fields_of(kept[index])
                for name, value in kept[index]:
                    assert dict(found)[name].dtype == value.dtype

    def teardown(self):
        shutil.rmtree(self.folder)


TestFeedingStoreMachine = StoreMachine.TestCase
TestFeedingStoreMachine.settings = settings(deadline=None, max_examples=6, stateful_step_count=7)
