"""Mistakes on the command lines of benchmarks are one line, before anything is measured."""

import pytest

from benchmarks import (
    adam16,
    checkpoint_memory,
    decoder,
    ema,
    encode_writing,
    encoded_shards,
    epochs,
    geglu,
    hashes,
    launches,
    levers,
    loader,
    muon,
    norms,
    operators,
    powersgd_cost,
    tensor_parallel,
    tokens,
)

SAYS = "give a whole number of 1 or more"


@pytest.mark.parametrize(
    ("benchmark", "words", "said"),
    [
        (adam16, "--rounds 0", f"--rounds: 0; {SAYS}"),
        (checkpoint_memory, "--folder nowhere", "--folder: there is no folder nowhere"),
        (decoder, "--batch 0", f"--batch: 0; {SAYS}"),
        (ema, "--rounds -1", f"--rounds: -1; {SAYS}"),
        (encode_writing, "--rounds 0", f"--rounds: 0; {SAYS}"),
        (encoded_shards, "--rounds 0", f"--rounds: 0; {SAYS}"),
        (encoded_shards, "--against nowhere", "--against: nowhere is no checkout of this repository"),
        (epochs, "--samples 10 0", f"--samples: 0; {SAYS}"),
        (epochs, "--samples 9000 90 --batches 3", "--samples: 90; give 96 or more, which --batches 3 reads"),
        (geglu, "--batch x", f"--batch: x; {SAYS}"),
        (hashes, "--repeats 0", f"--repeats: 0; {SAYS}"),
        (hashes, "--algorithms xxh64,none", "--algorithms: no 'none'; there are "),
        (launches, "--passes 0", f"--passes: 0; {SAYS}"),
        (levers, "--rounds 0", f"--rounds: 0; {SAYS}"),
        (levers, "--resolution 100", "--resolution: give multiples of 64"),
        (levers, "--warm-up 1", "--warm-up: 1; give 2 or more"),
        (loader, "--samples 0", f"--samples: 0; {SAYS}"),
        (loader, "--shard-size 16xx", "--shard-size: 16xx; give a size, such as 16mb"),
        (muon, "--layers 0", f"--layers: 0; {SAYS}"),
        (norms, "--most 0", f"--most: 0; {SAYS}"),
        (operators, "--rounds 0", f"--rounds: 0; {SAYS}"),
        (powersgd_cost, "--widths 64 --ranks 4", "--ranks: 4 leaves no rank to each of 8 shards"),
        (tensor_parallel, "--width 32", "--width must be a multiple of 64"),
        (tokens, "--samples 5", "--samples 5, --words 12: too few for a vocabulary; "),
    ],
)
def test_a_mistake_is_one_line(benchmark, words, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [benchmark.__name__, *words.split()])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert said in capsys.readouterr().err.splitlines()[-1]
