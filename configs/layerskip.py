"""LayerSkip's recipe on a trained model (Elhoushi et al. 2024, section 4.1).

    eejax train --config=configs/layerskip.py:12 --workdir=runs/layerskip \\
        --config.train.base=models/tinylm --config.data.source='texts/*.txt'

The argument is the number of the base's layers; `:30,tied` says too that its head is tied to the
embedding. An exit at every second boundary reads the final exit's own head through a copy of its
norm. Layers are left out while training, the last with probability 0.1 and lower ones less; one
exit after the other has a loss, the deeper with more weight: at layer l, counted from 0, with
e = 0.2, LayerSkip weighs e l (l + 1) / 2 against the last layer's L - 1 + e (L - 2) (L - 1) / 2.

Ours: exits at every second boundary and not behind every layer, the learning rate, the steps.
"""

from ml_collections import ConfigDict

from eejax.configs import finetune

E_SCALE = 0.2


def get_config(base: str = "12") -> ConfigDict:
    config = finetune.get_config()
    layers, _, head = base.partition(",")
    layers, head = int(layers), head or "shared"
    boundaries = range(2, layers, 2)
    config.model.n_layers = layers  # a base with another number of layers is refused
    config.model.exits = tuple({"boundary": n, "head": head} for n in boundaries)
    last = layers - 1 + E_SCALE * (layers - 2) * (layers - 1) / 2
    # The exit at boundary n is behind layer n - 1.
    config.exit_weights.update(
        weights=tuple(E_SCALE * (n - 1) * n / 2 / last for n in boundaries),
        curriculum="rotating",
    )
    config.optimizer.update(learning_rate=3e-4, schedule="constant")
    config.train.update(steps=2000, layer_dropout=0.1)
    return config
