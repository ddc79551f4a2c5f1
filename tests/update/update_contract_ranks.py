"""Train with every hook on two ranks; each rank writes what it has to ``<folder>/rank_<rank>.json``.

Lightning starts this script again for the second rank.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from update_contract_rigs import STRUCTURES, TABLE, make, recipe, result
from update_window_rigs import labelled

from nvalchemi_lightning.data import Batch, DataLoader


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    logging.getLogger("nvalchemi_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = {}
    for name in TABLE:
        hook = make(name)
        what = recipe(hook)
        loader = DataLoader(Batch.from_data_list(labelled(STRUCTURES, seed=2)), batch_size=2)
        what.run(loader, enable_progress_bar=False, strategy="nvalchemi_ddp", devices=2)
        found[name] = result(what, hook)
    (folder / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
