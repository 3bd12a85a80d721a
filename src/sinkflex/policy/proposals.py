"""A change in words, with all its ids: what a customer of retail or airline is asked to confirm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROPOSALS = {
    "cancel_pending_order": "cancel order {order_id} ({reason})",
    "return_delivered_order_items": "return items {item_ids} of order {order_id}, refunded to {payment_method_id}",
    "exchange_delivered_order_items": "exchange items {item_ids} for {new_item_ids} in order {order_id}, using "
    "{payment_method_id}",
    "modify_pending_order_items": "change items {item_ids} to {new_item_ids} in order {order_id}, using "
    "{payment_method_id}",
    "modify_pending_order_address": "change the address of order {order_id} to {address1}, {address2}, {city}, {zip}",
    "modify_user_address": "change your default address to {address1}, {address2}, {city}, {zip}",
    "modify_pending_order_payment": "change the payment of order {order_id} to {payment_method_id}",
    "cancel_reservation": "cancel reservation {reservation_id}",
    "update_reservation_flights": "change reservation {reservation_id} to {flights} in {cabin}, using {payment_id}",
    "update_reservation_passengers": "change the passengers of reservation {reservation_id} to {passengers}",
    "update_reservation_baggages": "change reservation {reservation_id} to {total_baggages} bags, using {payment_id}",
    "book_reservation": "book {flights} in {cabin} for {passengers}, paid with {payment_methods}",
    "send_certificate": "send you a certificate of ${amount}",
}


def proposal(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the change that a call makes, in words."""
    return PROPOSALS[name].format(**{key: _words(value) for key, value in arguments.items()})


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return " ".join(map(str, value.values())) if isinstance(value, dict) else str(value)
