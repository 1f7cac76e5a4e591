"""The table in words says of every objective what it is, and the numbers it really has."""

import pytest

from halfmatch import cli
from halfmatch.rl.objective_table import WIDTH, describe, table
from halfmatch.rl.objectives import OBJECTIVES, named, settings_of


def test_the_command_prints_every_row(capsys):
    assert cli.main(["objectives"]) == 0
    text = capsys.readouterr().out
    assert text == table() + "\n"
    blocks = [block.splitlines() for block in text.strip().split("\n\n")[1:]]
    assert [block[0] for block in blocks] == list(OBJECTIVES)
    for block in blocks:
        labels = [line.split()[0] for line in block[1:] if line[2] != " "]
        assert labels == list(describe(OBJECTIVES[block[0]]))
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_setting_stands_there_with_its_default(name):
    objective = OBJECTIVES[name]
    shown = dict(item.split(" ") for item in describe(objective)["settings"].split(", "))
    assert set(shown) == set(settings_of(objective))
    for setting, text in shown.items():
        owner = settings_of(objective)[setting]
        value = getattr(getattr(objective, owner) if owner else objective, setting)
        if isinstance(value, bool):
            assert text == ("true" if value else "false")
        else:
            assert type(value)(text) == value


def test_words_by_hand():
    dapo = describe(OBJECTIVES["dapo"])
    assert list(dapo) == ["loss", "denominator", "advantage", "settings", "source"]
    assert dapo["settings"] == (
        "clip_low 0.2, clip_high 0.28, dual_clip inf, denominator response-tokens, scale_by_std true, "
        "dynamic_sampling true, overlong_penalty 1, overlong_share 0.2, "
        "kl_coefficient 0, kl_estimator k3, kl_place loss"
    )
    assert dapo["advantage"] == "reward − mean of the rewards of its problem, over the standard deviation of the group"
    assert describe(OBJECTIVES["rloo"])["advantage"] == "reward − mean of the other rewards of the problem"
    assert describe(OBJECTIVES["icepop"])["correction"] == "times π(θ')/μ of the token, 0 beyond its bounds"
    assert describe(OBJECTIVES["pg-seq-tis"])["correction"] == "times π(θ)/μ of the response, truncated at its bounds"
    assert "|π(θ) − μ|" in describe(OBJECTIVES["dppo-tv"])["rejection"]
    assert "k3" in describe(OBJECTIVES["grpo-k3-mask"])["rejection"]
    assert "geometric mean" in describe(OBJECTIVES["grpo-geo-mask"])["rejection"]
    assert "geometric mean" in describe(OBJECTIVES["gspo"])["loss"]
    assert "GAE" in describe(OBJECTIVES["ppo"])["advantage"]
    assert describe(OBJECTIVES["ppo"])["settings"].startswith(
        "discount 1, gae_lambda 0.95, value_clip 0.2, clip_low 0.2,"
    )
    dpo = describe(OBJECTIVES["dpo"])
    assert list(dpo) == ["loss", "denominator", "settings", "source"]
    assert "pairs" in dpo["denominator"]
    assert dpo["settings"] == "beta 0.1, dynamic_sampling true"


def test_changed_settings_are_described_as_they_are():
    assert "bound 3," in describe(named("grpo-token-tis", {"bound": 3}))["settings"]
