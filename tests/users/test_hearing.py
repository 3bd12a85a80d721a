"""What a scripted customer makes of an agent's phrases."""

from __future__ import annotations

import pytest

from sinkflex.users.hearing import hear
from sinkflex.users.retail import RetailUser


@pytest.mark.parametrize(
    ("text", "topics"),
    [
        ("I'll need to verify your identity. Could you provide your email, or your name and zip code?", "identity"),
        ("Please confirm your email address.", "identity"),
        ("To confirm, could you please provide your zip code?", "identity"),
        ("May I have your email, please?", "identity"),
        ("I need the following:\n1. order id\n2. items to be returned", "items order"),
        ("Could you tell me the new shipping address?", "address"),
        ("Would you like to use the original payment method or a different one?", "payment"),
        ("Here are the options:\n- black\n- white\nWhich one would you like?", "items new"),
        ("Which item would you like to exchange it for?", "items new"),
        ("Thanks. To go on I need to know the reason.", "reason"),
        ("What would you like to do today?", "help"),
        ("Do you want me to proceed with the return?", "confirm"),
        ("Please confirm if you'd like to go on by replying 'yes'.", "confirm"),
        ("Please confirm:\n- Order: #W1\n- Item: 2\nIs that correct? (yes/no)", "confirm"),
        ("Single items cannot be cancelled. Would you like to cancel the whole order?", "confirm refusal"),
        ("I couldn't find an account with that email. Could you double-check it?", "missing"),
        ("The item is out of stock.", "refusal"),
        ("I have processed your return.", "done"),
        ("Your refund takes 5 days. Let me know if you have any other questions!", "closing"),
        ("Shall I look up your order?", "offer"),
        ("Would you like me to transfer you to a human agent?", "human"),
        ("I am transferring you now. YOU ARE BEING TRANSFERRED TO A HUMAN AGENT.", "transfer"),
        ("I will return it to your payment method.", ""),
        ("Let me check your order id.", ""),
        ("There are 10 options.", ""),
    ],
)
def test_paraphrases_are_heard(text: str, topics: str) -> None:
    assert " ".join(sorted(hear(text, RetailUser.topics).topics)) == topics
