"""The data that a configuration names, and the vocabulary that the data set leaves it to take over."""

from base.cli import UserError
from configs import Config, replace
from data import Dataset, check_token_range, ensure_prepared, open_dataset
from training.runtime import Runtime, is_local_main


def open_data(config: Config, runtime: Runtime) -> tuple[Config, Dataset]:
    """The configuration with its vocabulary, and the data set; the default one is prepared if it is missing.

    Raises UserError and UserError, on the first process only.
    """
    runtime.on_main(lambda: ensure_prepared(config.data.dataset))
    dataset = runtime.on_all(lambda: open_dataset(config.data.dataset))
    return runtime.on_all(lambda: fit(config, dataset)), dataset


def fit(config: Config, dataset: Dataset) -> Config:
    """The configuration with the data set's vocabulary, checked against the ids that the data really holds."""
    if config.model.vocab_size == 0:
        if dataset.vocab_size is None:
            raise UserError(
                f"{dataset.path} does not say how large its vocabulary is; pass --vocab-size, say 65"
            )
        config = replace(config, "model", vocab_size=dataset.vocab_size)
    if is_local_main():  # as this may read all of it
        check_token_range(dataset, config.model.vocab_size)
    return config
