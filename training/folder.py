"""A run's folder: what it holds, who may take it, and whether a resumed run is still the same run."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import Config, ConfigError, to_toml
from training import checkpoint
from training.tracker import cut_after

MAY_CHANGE = {  # on resume; everything else decides what the run computes
    "optim": {"max_iters", "micro_batch_size"},
    "model": {"kernel"},
    "run": {
        *("out_dir", "run_name", "device", "compile", "parallel", "log_interval", "eval_interval"),
        *("eval_tokens", "checkpoint_interval", "wandb", "wandb_project", "probe_interval", "max_loss_rise"),
    },
}


def choose(config: Config) -> Path:
    """The run's folder. Raises ConfigError if it holds something and no flag says what to do with it."""
    run_dir = Path(config.run.out_dir) / config.run.run_name
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(
            f"{run_dir} is a file, and the run needs a folder of that name; pass another --run-name"
        )
    is_run = (run_dir / "config.toml").exists()
    if config.start.resume:
        if not is_run:
            raise ConfigError(f"--resume: {run_dir} holds no run")
    elif run_dir.exists() and any(run_dir.iterdir()):
        if not is_run:
            raise ConfigError(f"{run_dir} holds files that are not a run's; pass another --run-name")
        if not config.start.overwrite:
            raise ConfigError(
                f"{run_dir} already holds a run; pass --resume, --overwrite or another --run-name"
            )
    return run_dir


def claim(run_dir: Path, config: Config, step: int) -> None:
    """Makes the folder ready for training from `step` on; only now does --overwrite delete anything."""
    try:
        if config.start.overwrite and run_dir.exists():
            shutil.rmtree(run_dir)
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        checkpoint.clean(run_dir)
        cut_after(run_dir / "metrics.jsonl", step)
        temporary = run_dir / ".config.toml"
        temporary.write_text(to_toml(config), encoding="utf-8")
        temporary.replace(run_dir / "config.toml")
    except OSError as e:
        raise ConfigError(f"{run_dir} cannot be written: {e.strerror}") from None


def check_same_run(config: Config, saved: dict[str, Any], tell) -> None:
    """Tells harmless changes of a resumed run's configuration and raises ConfigError for the others, by name."""
    refused = []
    for section, fields in asdict(config).items():
        for name, value in fields.items():
            before = saved.get(section, {}).get(name)
            if section == "start" or value == before:
                continue
            if name in MAY_CHANGE.get(section, ()):
                tell(f"{name} was {before} and is {value} from here on")
            else:
                refused.append(f"{name} was {before} and is now {value}")
    if refused:
        raise ConfigError(
            f"--resume: {', '.join(refused)}, which would be another run; "
            "go on from its own config.toml, or start a new run with --init-from"
        )
