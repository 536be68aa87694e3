import random

from train.facts import draw_facts


def test_the_held_out_facts_are_not_those_of_training():
    rng = random.Random(0)
    trained = {fact.sentence for _ in range(400) for fact in draw_facts(rng, 8, held_out=False)}
    held_out = {fact.sentence for _ in range(100) for fact in draw_facts(rng, 8, held_out=True)}
    assert len(trained) > 1000
    assert len(held_out) > 200
    assert not trained & held_out


def test_no_two_facts_of_a_conversation_are_about_the_same_thing():
    rng = random.Random(1)
    for _ in range(100):
        known = draw_facts(rng, 8, held_out=False)
        facts = known + draw_facts(rng, 8, held_out=False, known=known)
        assert len({fact.topic for fact in facts}) == 16
        assert len({(fact.subject, fact.kind) for fact in facts}) == 16


def test_every_question_names_the_subject_and_not_the_value():
    rng = random.Random(2)
    for fact in draw_facts(rng, 40, held_out=False):
        value = fact.sentence.rstrip(".").split()[-1]
        for question in fact.questions:
            assert fact.subject in question
            assert value not in question
