"""Throughput, and the line on the screen."""

import time


class Clock:
    """Throughput since the last look, and a line on the screen at most every two seconds."""

    def __init__(self, tokens_per_step: int, step: int, last: int):
        self.tokens_per_step, self.last = tokens_per_step, last
        self.rate, self.shown = 0.0, 0.0
        self.restart(step)

    def restart(self, step: int) -> None:
        """Leaves out what is not training: evaluation, checkpoints."""
        self.step, self.time = step, time.perf_counter()

    def lap(self, step: int) -> dict[str, float]:
        steps, seconds = step - self.step, time.perf_counter() - self.time
        self.restart(step)
        self.rate = steps * self.tokens_per_step / seconds
        return {"perf/tokens_per_s": self.rate, "perf/step_ms": 1000 * seconds / steps}

    def show(self, step: int, row: dict, tell) -> None:
        now = time.perf_counter()
        if "val/loss" not in row and now - self.shown < 2:
            return
        self.shown = now
        parts = [f"step {step}/{self.last}"]
        parts += [f"loss {row['train/loss']:.4f}"] if "train/loss" in row else []
        parts += [f"val loss {row['val/loss']:.4f}"] if "val/loss" in row else []
        if self.rate:
            left = (self.last - step) * self.tokens_per_step / self.rate
            parts += [f"{self.rate:,.0f} tokens/s", f"{duration(left)} left"]
        tell("  ".join(parts), flush=True)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
