"""What clients have of something that all share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxtune.serve.shares import Shares

MOST = 64
# (client, its amount; None: it gives back what it took last)
STEPS = st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, MOST)), max_size=60)


@given(STEPS)
def test_drawn_clients_leave_others_as_much_as_they_have(steps):
    shares, takings = Shares(MOST), {client: [] for client in range(6)}
    for client, amount in steps:
        had, free = sum(takings[client]), MOST - sum(map(sum, takings.values()))
        if amount is None:
            if takings[client]:
                shares.give_back(client, takings[client].pop())
        else:
            may = shares.take(client, amount)
            assert may == (amount == 0 or had + amount <= free - amount)
            assert may or had or 2 * amount > free, "a client that has nothing finds half of what is free"
            takings[client] += [amount] * may
        assert [shares.amount(each) for each in takings] == [sum(amounts) for amounts in takings.values()]
        assert shares.total == sum(map(sum, takings.values())) < MOST
    for client, amounts in takings.items():
        for amount in amounts:
            shares.give_back(client, amount)
    assert shares.total == 0 and not shares._amounts
    assert shares.take("alone", MOST // 2) and not shares.take("alone", 1) and shares.take("other", MOST // 4)
