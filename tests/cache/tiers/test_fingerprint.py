from perilune.cache.tiers.fingerprint import fingerprint


def test_the_order_of_settings_does_not_matter_and_every_value_does():
    one = fingerprint({"a": 1, "b": [1, 2]})
    assert one == fingerprint({"b": [1, 2], "a": 1})
    others = [{"a": 1, "b": [2, 1]}, {"a": "1", "b": [1, 2]}, {"a": 1.5, "b": [1, 2]}, {"a": 1}]
    assert len({one.digest, *(fingerprint(other).digest for other in others)}) == 5
