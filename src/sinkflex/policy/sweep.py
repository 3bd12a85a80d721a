"""A rule-based telecom expert: look the customer up, ask what the phone shows, mend what is broken, check, hand over.

Without `diagnose` it does not ask what the phone shows: it has the user try every remedy in turn. Alone, it flips a
switch back when the answer shows that it stood right.

It knows the domain's remedies but no task's answer: it reads only what the agent can see (the user's words and the
results of its own tools). It gives the demonstrations of the warm start.

    user:   I am unable to send MMS messages ... John Smith with phone number 555-123-2002 ... abroad in France.
    agent:  get_customer_by_phone
    agent:  Please check your network status and check your Wi-Fi calling.
    agent:  enable_roaming, get_data_usage
    agent:  Please turn off airplane mode and turn on data roaming.
    agent:  Please try to send an MMS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.recipe import did_you_mean
from sinkflex.seeds import generator
from sinkflex.users.telecom_phrases import Request, verbalize

MAX_REFUEL_GB = 2.0  # the policy's limit
MAX_WORDS = 12  # of one message to the user
REASSURANCE = "Yes, it is safe. Please go ahead."
TRANSFER_NOTICE = "You are being transferred to a human agent. Please hold on."

# The checks that reveal the faults behind each kind of complaint.
CHECKS = {
    "service": ("check_network_status", "check_apn_settings"),
    "speed": ("check_network_status",),
    "mms": ("check_network_status", "check_wifi_calling_status", "check_app_permissions", "check_apn_settings"),
}
# The check that shows whether the problem is solved, and what it shows then.
GOALS = {
    "service": ("check_status_bar", r"\A(?!.*(?:no signal|airplane))"),
    "speed": ("run_speed_test", r"\(Excellent\)"),
    "mms": ("can_send_mms", r"\bcan send MMS"),
}
_APP = {"app_name": "messaging"}
_PHONE = re.compile(r"\d{3}-\d{3}-\d{4}")

# check: (what a report of that check shows when something is wrong, the remedy, the complaints it matters to).
FAULTS: dict[str, tuple[tuple[str, Request, tuple[str, ...]], ...]] = {
    "check_network_status": (
        (r"airplane mode: on", Request("toggle_airplane_mode", on=False), ("service", "speed", "mms")),
        (r"sim(?: card status)?: missing", Request("reseat_sim_card"), ("service", "speed", "mms")),
        (r"mobile data(?: enabled)?: (?:no|off)", Request("toggle_data", on=True), ("speed", "mms")),
        (r"roaming(?: enabled)?: (?:no|off)", Request("toggle_roaming", on=True), ("speed", "mms")),
    ),
    "check_apn_settings": ((r"not set|broken", Request("reset_apn_settings"), ("service", "mms")),),
    "check_wifi_calling_status": ((r"turned on", Request("toggle_wifi_calling", on=False), ("mms",)),),
    "check_app_permissions": tuple(
        (
            rf"\A(?!.*\b{name}\b)",
            Request("grant_app_permission", {**_APP, "permission": name}),
            ("mms",),
        )
        for name in ("sms", "storage")
    ),
    "check_status_bar": (
        (r"\b[23]g\b", Request("set_network_mode_preference", {"mode": "4g_5g_preferred"}), ("speed", "mms")),
        (r"data saver", Request("toggle_data_saver_mode", on=False), ("speed",)),
        (r"vpn connected", Request("disconnect_vpn"), ("speed",)),
    ),
}
REMEDIES = tuple(dict.fromkeys(remedy.tool for faults in FAULTS.values() for _, remedy, _ in faults))

Script = Generator[Action, str, Any]


class SweepAgent:
    """The expert as a policy of one episode at a time: `reset(seed)`, then `act(messages)` until the episode ends.

    Args:
        rng_seed: with the seed of `reset`, decides omissions and order.
        omit: probability that a check or a remedy is left out, each on its own; makes imperfect demonstrations.
        forget: {tool of a remedy on the phone: probability that it is left out, in place of `omit`}.
        diagnose: mend only what a check shows to be broken; False tries every remedy, which costs as many turns and
            needs no reading: the user guards the phone's toggles, and alone the answer to a call says how one stands.
        shuffle: randomize the order of checks and remedies that do not depend on each other.
        solo: the agent owns the phone's tools and ends the episode with `done`.
    """

    def __init__(
        self,
        rng_seed: int = 0,
        omit: float = 0.0,
        forget: Mapping[str, float] | None = None,
        diagnose: bool = True,
        shuffle: bool = False,
        solo: bool = False,
    ) -> None:
        self.rng_seed = rng_seed
        self.omit = omit
        self.forget = dict(forget or {})
        for name in self.forget:
            if name not in REMEDIES:
                raise ValueError(
                    f"the expert has no remedy {name!r} to forget.{did_you_mean(name, REMEDIES)} "
                    f"Remedies: {', '.join(REMEDIES)}."
                )
        self.diagnose = diagnose
        self.shuffle = shuffle
        self.solo = solo
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget everything and start an episode."""
        self._rng = generator(self.rng_seed, "expert", seed)
        self._seen = 0
        self._script: Script | None = None

    def act(self, messages: list[Message]) -> Action:
        """Return the next action.

        Args:
            messages: the conversation so far as the agent sees it; it grows from call to call.
        """
        heard = "\n".join(m.content for m in messages[self._seen :] if m.role in ("user", "tool"))
        self._seen = len(messages)
        if self._script is None:
            self._script = self._solve(heard)
            return next(self._script)
        return self._script.send(heard)

    def _solve(self, opening: str) -> Script:
        """The whole episode: yields actions, is sent what comes back, and never ends by itself."""
        self._opening = opening
        self._single = self.solo or "one step at a time" in opening
        self._family = "mms" if "MMS" in opening else "speed" if "mobile data" in opening else "service"
        self._abroad = "abroad" in opening
        self._remedies: list[Request] = []
        self._reboot = False
        self._keys = yield from self._identify()
        parts = [self._diagnose, self._account]
        if self.shuffle and self._rng.random() < 0.5:
            parts.reverse()
        hopeless = not self._keys or (yield from parts[0]()) or (yield from parts[1]())
        if not hopeless and (yield from self._mend()):
            while True:
                yield from self._call("done") if self.solo else self._say("Is there anything else?")
        yield from self._call("transfer_to_human_agents", summary="The issue could not be solved.")
        while True:
            yield from self._call("done") if self.solo else self._say(TRANSFER_NOTICE)

    def _identify(self) -> Script:
        """Look the customer up. Returns the ids of customer and line that the agent's tools want, or {}."""
        phone = _PHONE.search(self._opening) or _PHONE.search((yield from self._say("What is your phone number?")))
        if not phone:
            return {}
        customer = _fields((yield from self._call("get_customer_by_phone", phone_number=phone[0])))
        if not customer.get("line_ids"):
            return {}
        line = min(customer["line_ids"], key=lambda name: name[-3:] != phone[0][-3:])  # L1002 is 555-123-2002
        return {"customer_id": customer["customer_id"], "line_id": line}

    def _diagnose(self) -> Script:
        """Collect the remedies for what the phone shows. Returns True if a locked SIM makes the case hopeless."""
        if not self.diagnose:
            self._remedies = [remedy for check in FAULTS for remedy in self._faults(check)]
            return False
        checks = self._chosen([Request(name, _APP if "app" in name else {}) for name in CHECKS[self._family]])
        heard = yield from self._request(checks)
        for check in checks:
            self._remedies += self._faults(check.tool, heard)
        return _shows(r"sim(?: card status)?: locked", heard)

    def _account(self) -> Script:
        """Mend what the agent's own tools can. Returns True if an ended contract makes the case hopeless."""
        if self._family == "service":
            return (yield from self._lift_suspension())
        for remedy in self._chosen([self._enable_roaming, self._refuel] if self._abroad else [self._refuel]):
            yield from remedy()
        return False

    def _lift_suspension(self) -> Script:
        """Have the overdue bill paid and resume the line. Returns True if the contract has ended: not allowed then."""
        line = _fields((yield from self._call("get_details_by_id", id=self._keys["line_id"])))
        if line.get("status") != "Suspended":
            return False
        if str(line["contract_end_date"]) < str(line["suspension_start_date"]):
            return True
        bills = _fields((yield from self._call("get_bills_for_customer", customer_id=self._keys["customer_id"])))
        for bill in bills:
            if bill["status"] == "Overdue":
                bill_key = {"customer_id": self._keys["customer_id"], "bill_id": bill["bill_id"]}
                yield from self._call("send_payment_request", **bill_key)
                yield from self._request([Request("make_payment")])
        yield from self._call("resume_line", **self._keys)
        self._reboot = True
        return False

    def _enable_roaming(self) -> Script:
        yield from self._call("enable_roaming", **self._keys)

    def _refuel(self) -> Script:
        """Add data if it is used up, as much as the user wants."""
        usage = _fields((yield from self._call("get_data_usage", **self._keys)))
        used, limit, extra = (float(usage.get(f"data_{name}_gb", 0)) for name in ("used", "limit", "refueling"))
        if not usage or used < limit + extra:
            return
        question = "Your data is used up. How much should I refuel?"
        answer = self._opening if self.solo else (yield from self._say(question))
        amount = re.search(r"([\d.]+) GB", answer)
        yield from self._call("refuel_data", **self._keys, gb_amount=float(amount[1]) if amount else MAX_REFUEL_GB)

    def _mend(self) -> Script:
        """Apply the remedies, then those the status bar asks for. Returns whether the goal check shows success."""
        remedies = self._chosen(self._remedies)
        if self._reboot or Request("reset_apn_settings") in remedies:
            remedies.append(Request("reboot_device"))
        bar = yield from self._request(remedies)
        if self.diagnose and self._family != "service":
            if "status bar" not in bar.lower():
                bar = yield from self._request([Request("check_status_bar")])
            bar = bar.lower().rpartition("status bar")[2]
            yield from self._request(self._chosen(self._faults("check_status_bar", bar)))
        shown = yield from self._request([Request(GOALS[self._family][0])])
        return _shows(GOALS[self._family][1], shown)

    def _faults(self, check: str, heard: str | None = None) -> list[Request]:
        """Return the remedies for the faults that the report of a check shows, or for all it could show."""
        return [
            remedy
            for pattern, remedy, families in FAULTS[check]
            if self._family in families
            and (self._abroad or remedy.tool != "toggle_roaming")
            and (heard is None or _shows(pattern, heard))
        ]

    def _chosen(self, items: list[Any]) -> list[Any]:
        """Return the items in a random order if `shuffle`, each left out with its probability."""
        chances = [self.forget.get(item.tool, self.omit) if isinstance(item, Request) else self.omit for item in items]
        kept = [item for item, chance in zip(items, chances, strict=True) if self._rng.random() >= chance]
        return [kept[i] for i in self._rng.permutation(len(kept))] if self.shuffle else kept

    def _request(self, wanted: list[Request]) -> Script:
        """Have the user (in solo: the agent's own tools) do things. Returns all that comes back."""
        heard = []
        if self.solo:
            for request in wanted:
                heard.append((yield from self._call(request.tool, **request.arguments)))
                if request.on is not None and _shows(rf"is now {'off' if request.on else 'on'}", heard[-1]):
                    heard.append((yield from self._call(request.tool, **request.arguments)))
        else:
            for message in self._messages(wanted):
                heard.append((yield from self._say(message)))
                if heard[-1].endswith("?"):
                    heard.append((yield from self._say(REASSURANCE)))
        return "\n".join(heard)

    def _messages(self, wanted: list[Request]) -> list[str]:
        """Return the requests as messages of one or two requests and at most `MAX_WORDS` words."""
        messages: list[str] = []
        joined = False
        for request in wanted:
            sentence = verbalize(request.tool, request.arguments, request.on)
            pair = f"{messages[-1][:-1]} and {sentence.removeprefix('Please ')}" if messages else ""
            if pair and not self._single and not joined and len(pair.split()) <= MAX_WORDS:
                messages[-1], joined = pair, True
            else:
                messages.append(sentence)
                joined = False
        return messages

    def _call(self, name: str, **arguments: Any) -> Script:
        return (yield Action(tool_calls=(ToolCall(name, arguments),)))

    def _say(self, text: str) -> Script:
        return (yield Action(text=text))


def _shows(pattern: str, heard: str) -> bool:
    """Return whether what came back, over all its lines and in any case, matches a pattern."""
    return re.search(pattern, heard, re.IGNORECASE | re.DOTALL) is not None


def _fields(content: str) -> Any:
    """Return the value of a tool result in JSON, or {} if it is none (an error message)."""
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        return {}
