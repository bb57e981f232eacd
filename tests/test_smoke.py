import holdfast


def test_every_law_holds_for_fast():
    laws = holdfast.check("fast")
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
