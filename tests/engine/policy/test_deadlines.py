from perilune.engine.policy.deadlines import Deadlines


def test_a_deadline_passes_when_its_time_has_come_and_stays_passed_until_it_is_removed():
    deadlines = Deadlines()
    for request_id, deadline_s in (("late", 5.0), ("soon", 2.0), ("same", 2.0)):
        deadlines.add(request_id, deadline_s)
    assert deadlines.passed(1.9) == []
    assert deadlines.passed(2.0) == ["soon", "same"]
    for request_id in ("soon", "same"):
        deadlines.remove(request_id)
    assert deadlines.passed(4.9) == []
    assert deadlines.passed(5.0) == ["late"]


def test_a_removed_request_does_not_pass_and_one_of_the_same_name_has_a_deadline_of_its_own():
    deadlines = Deadlines()
    deadlines.add("r", 2.0)
    deadlines.remove("r")
    deadlines.remove("never there")
    deadlines.add("r", 7.0)
    assert deadlines.passed(3.0) == []
    assert deadlines.passed(7.0) == ["r"]


def test_one_that_is_added_after_others_have_passed_is_not_missed():
    deadlines = Deadlines()
    deadlines.add("first", 1.0)
    assert deadlines.passed(1.0) == ["first"]
    deadlines.remove("first")
    deadlines.add("second", 3.0)
    assert deadlines.passed(2.0) == []
    assert deadlines.passed(3.0) == ["second"]
