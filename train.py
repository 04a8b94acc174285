"""Train a GPT from a recipe and record what its normalization does inside.

    python train.py configs/quickstart.toml --norm rmsnorm --placement sandwich
    torchrun --nproc-per-node 8 train.py configs/gpt2_124m.toml
"""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from configs import Config, ConfigError, load_config, replace, to_toml, user_error


def main(argv: Sequence[str]) -> None:
    try:
        config = load_config(argv)
        if not argv:
            raise ConfigError("name a recipe, for example `python train.py configs/quickstart.toml`; --help lists more")
        # torch's caches, unless the user has chosen a place; imported only now, so that --help is quick
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ.setdefault(name, str(Path(config.run.out_dir, ".cache", name.split("_")[0].lower()).absolute()))
        from training import loop

        loop.run(config)
    except ValueError as e:
        user_error(str(e))


if __name__ == "__main__":
    main(sys.argv[1:])
