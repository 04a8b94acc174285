"""What the loop in train.py leans on.

- `setup`: device, dtype, kernel, processes and data, before anything is built
- `trainer`: the model, its optimizer and one step; `optimizer`; `parallel` (several processes); `malloc` (glibc)
- `metrics`: the names of what is recorded, without torch; `dynamics` (each step), `probe` (the closer look), `clock`
- `run`: a run's folder, start and end; `checkpoint`: what it saves; `tracker`: metrics.jsonl and wandb
- `divergence`: spikes and failures, and their replay; `sampling`: text
"""
