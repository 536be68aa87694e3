from perilune.server.calls import CallIds


def test_calls_are_numbered_in_their_order():
    ids = CallIds(())
    assert [ids.next(name) for name in ("f", "g", "f")] == ["f_0", "g_1", "f_2"]


def test_numbers_go_on_from_the_calls_of_the_conversation():
    assert CallIds(("f_0", "call_abc")).next("f") == "f_2"


def test_no_id_is_given_twice():
    ids = CallIds(("f_1", "f_3"))
    assert [ids.next("f"), ids.next("f"), ids.next("g")] == ["f_2", "f_4", "g_4"]
