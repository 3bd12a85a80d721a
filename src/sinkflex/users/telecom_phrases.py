"""The phrase book of the telecom user: agent sentences to requests, and tool results to short reports.

    requests("Please turn off airplane mode and reboot your phone.")
        -> [Request("toggle_airplane_mode", {}, on=False), Request("reboot_device")]
    verbalize("toggle_airplane_mode")     -> "Please turn off airplane mode."
    report("run_speed_test", "Speed Test Result: 275.00 Mbps (Excellent). Connection is very fast.")
        -> "Speed Test Result: 275.00 Mbps (Excellent)."

A sentence is read as a run of tokens: verbs (check, turn on, reset ...), objects (airplane mode, SIM ...), particles
(on, off) and pronouns. A verb applies to the objects after it; a bare "turn" waits for its particle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_CHARACTERS = 4000  # what a person reads of one message; keeps a runaway agent message cheap
MAX_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Request:
    """One thing the agent asks the user to do: a user tool, its arguments, and for a switch the state asked for.

    `on` is None for tools that are no switch, and for a switch that is to be flipped whatever its state.
    """

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    on: bool | None = None


@dataclass(frozen=True, slots=True)
class Switch:
    """A setting with two states: its name, the tool that reads it, the text that tool shows when it is on, and
    the state in which it does not get in the way of service, data and MMS."""

    name: str
    reader: str
    shows_on: str
    healthy: bool


SWITCHES = {
    "toggle_airplane_mode": Switch("airplane mode", "check_network_status", "Airplane Mode: ON", False),
    "toggle_data": Switch("mobile data", "check_network_status", "Mobile Data Enabled: Yes", True),
    "toggle_roaming": Switch("data roaming", "check_network_status", "Data Roaming Enabled: Yes", True),
    "toggle_data_saver_mode": Switch("data saver", "check_data_restriction_status", "mode is ON", False),
    "toggle_wifi": Switch("Wi-Fi", "check_wifi_status", "Wi-Fi is ON", False),
    "toggle_wifi_calling": Switch("Wi-Fi calling", "check_wifi_calling_status", "turned ON", False),
}

SENTENCES = {
    "check_status_bar": "Please check your status bar.",
    "check_network_status": "Please check your network status.",
    "check_network_mode_preference": "Please check your network mode.",
    "run_speed_test": "Please run a speed test.",
    "check_sim_status": "Please check your SIM card.",
    "check_data_restriction_status": "Please check if data saver is on.",
    "check_apn_settings": "Please check your APN settings.",
    "check_wifi_status": "Please check your Wi-Fi.",
    "check_wifi_calling_status": "Please check your Wi-Fi calling.",
    "check_vpn_status": "Please check your VPN.",
    "check_installed_apps": "Please check which apps are installed.",
    "check_app_status": "Please check the status of your {app_name} app.",
    "check_app_permissions": "Please check your {app_name} app permissions.",
    "can_send_mms": "Please try to send an MMS.",
    "check_payment_request": "Please check your payment request.",
    "reseat_sim_card": "Please reseat your SIM card.",
    "reset_apn_settings": "Please reset your APN settings.",
    "set_apn_settings": "Please set your APN to internet.",
    "connect_vpn": "Please connect your VPN.",
    "disconnect_vpn": "Please disconnect your VPN.",
    "grant_app_permission": "Please grant {permission} permission to {app_name}.",
    "reboot_device": "Please reboot your phone.",
    "make_payment": "Please pay the bill.",
    "set_network_mode_preference": "Please set your network mode to {mode}.",
}
MODES = {"4g_5g_preferred": "4G/5G", "4g_only": "4G only", "3g_only": "3G only", "2g_only": "2G only"}


def verbalize(tool: str, arguments: Mapping[str, Any] | None = None, on: bool | None = None) -> str:
    """Return the canonical agent sentence that makes the user run `tool`; `on` defaults to a switch's healthy state.

    Raises:
        KeyError: `tool` is not a tool of the telecom user.
    """
    if tool in SWITCHES:
        switch = SWITCHES[tool]
        state = switch.healthy if on is None else on
        return f"Please turn {'on' if state else 'off'} {switch.name}."
    values = {"app_name": "messaging", **(arguments or {})}
    if "mode" in values:
        values["mode"] = MODES.get(values["mode"], values["mode"])
    return SENTENCES[tool].format(**values)


# --- Reading the agent's words ---------------------------------------------------------------------------------

_VERBS = {
    "reboot": r"(?:reboot|restart)(?! (?:the|your) (?:app|messag|brows))|power[ -]cycle"
    r"|(?:turn|switch) (?:your|the) (?:phone|device) off and (?:back )?on",
    "pay": r"pay|make (?:the |a |your |this )?payment|complete (?:the |your )?payment|accept|approve",
    "off": r"(?:turn|switch|toggle)(?: back)? off|disable|deactivate|disconnect",
    "on": r"(?:turn|switch|toggle)(?: back)? on|(?:re-?)?enable|(?:re-?)?activate|connect",
    "ensure": r"make sure|ensure",
    "reset": r"reset|restore",
    "reseat": r"re-?seat|re-?insert|remove|take out|eject|pull out",
    "grant": r"grant|allow|give",
    "turn": r"turn|toggle|switch|set|change|put|flip",
    "check": r"check|verify|confirm|look|see|tell me|show|view|open|read|report|test|try|run|perform|send|what|which"
    r"|let me know",
}
_OBJECTS = {
    "check_status_bar": r"status bar|icons?|top of (?:the|your) screen|battery|signal(?: strength)?|bars",
    "run_speed_test": r"speed ?test|(?:internet |download |data |connection )?speed",
    "check_apn_settings": r"apn(?: settings)?|access point names?",
    "toggle_wifi_calling": r"wi-?fi[ -]call(?:ing|s)",
    "toggle_wifi": r"wi-?fi",
    "toggle_data_saver_mode": r"data[ -]?sav(?:er|ing)|data[ -](?:restrict|limit)\w*",
    "toggle_roaming": r"(?:mobile |cellular )?(?:data )?roaming",
    "vpn": r"vpn",
    "toggle_airplane_mode": r"(?:airplane|aeroplane|plane|flight)[ -]mode",
    "check_sim_status": r"sim(?: card)?",
    "check_network_mode_preference": r"(?:preferred )?network (?:mode|type|technology|preference)s?|preferred network",
    "check_network_status": r"(?:network|cellular|connection) (?:status|connection|settings?)|network",
    "check_app_permissions": r"permissions?",
    "check_installed_apps": r"installed apps|apps (?:are |you have )?installed|your apps",
    "check_app_status": r"app status|status of (?:the|your) \w+ app",
    "can_send_mms": r"mms|(?:picture|multimedia|photo) messag\w*|(?:a |the )(?:picture|photo)",
    "check_payment_request": r"payment requests?",
    "toggle_data": r"(?:mobile |cellular )?data(?! (?:usage|plan|limit|allowance))",
}
_OTHER = {
    "mode": r"(?P<generation>[2345])g(?:(?: ?/ ?| or | and |_)5g)?(?: preferred| only|_preferred|_only)?",
    "it": r"it|them|that",
    "if": r"if|whether|unless",
    "permission": r"sms|storage|camera|location|contacts|(?:phone|network)(?= (?:permission|access))",
    "yes": r"on|enabled",
    "no": r"off|disabled",
}
_TOKEN = re.compile(
    "|".join(rf"\b(?P<{kind}>{text})\b" for kind, text in {**_VERBS, **_OBJECTS, **_OTHER}.items()), re.ASCII
)
_GERUND = re.compile(r"\b(?:try|by|suggest|recommend|consider) (\w+ing)\b")
_IMPERATIVE = {
    "turning": "turn", "switching": "switch", "toggling": "toggle", "disabling": "disable", "enabling": "enable",
    "rebooting": "reboot", "restarting": "restart", "resetting": "reset", "reseating": "reseat", "running": "run",
    "checking": "check", "setting": "set", "changing": "change", "granting": "grant", "sending": "send",
    "disconnecting": "disconnect", "removing": "remove", "reinserting": "reinsert",
}  # fmt: skip
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
_CLAUSE = re.compile(r",|;|\bthen\b|\bbut\b|\band (?=please|you |could|can |also )")
_POLITE = re.compile(r"\b(?:can|could|would|will) you\b(?: please)?(?! (?:like|want|prefer|be|have|tell|send|see))")
_OPENERS = r"^(?:(?:ok|okay|great|thanks|thank you|now|also|and|so|well|alright|perfect|good|yes|no|since|as)\b[ ,]*)*"
_FIRST_PERSON = re.compile(
    _OPENERS + r"(?:(?:i|i'm|i've|i'll|i'd|we|we've|we'll|our|let me(?! know))\b(?!.*\byou to\b)"
    r"|(?:shall|should|may|can|could) (?:i|we)\b|(?:would you like|do you want) (?:me|us)\b)"
)
_QUESTION = re.compile(_OPENERS + r"(?:is|are|do|does|did|can|has|have)\b")
_NEGATED = re.compile(r"\b(?:do not|don't|never|no need|not need|without|instead of|avoid)\b")


def clauses(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the clauses of a message in lower case; the flag is true where a new sentence starts."""
    text = text[:MAX_CHARACTERS].lower().replace("\u2019", "'").replace("_", " ")  # tool names read as words
    text = _GERUND.sub(lambda match: _IMPERATIVE.get(match[1], match[0]), text)
    for sentence in _SENTENCE.split(text):
        for index, clause in enumerate(_CLAUSE.split(sentence)):
            yield clause.strip(), index == 0


def requests(text: str) -> list[Request]:
    """Return what the agent asks the user to do on the phone, in order; saying it twice in a row counts once."""
    found: list[Request] = []
    verb: str | None = None
    topic: str | None = None
    for clause, starts_sentence in clauses(text):
        verb = None if starts_sentence else verb
        idle = bool(_FIRST_PERSON.match(clause) or _NEGATED.search(clause))
        if idle:
            verb = None
        elif _QUESTION.match(clause) and not _POLITE.match(clause):
            verb = "check"
        asked, verb, topic = _read_clause(clause, verb, topic)
        for request in [] if idle else asked:
            if not found or request != found[-1]:
                found.append(request)
        if len(found) >= MAX_REQUESTS:
            break
    return found[:MAX_REQUESTS]


def _read_clause(clause: str, verb: str | None, topic: str | None) -> tuple[list[Request], str | None, str | None]:
    """Read one clause. `topic` is what "it" refers to; both carry over to the next clause."""
    found: list[Request] = []
    waiting: str | None = None  # the object of a bare "turn" or "make sure", until "on" or "off" follows
    condition = False
    app = {"app_name": "browser" if "browser" in clause else "messaging"}
    for match in _TOKEN.finditer(clause):
        kind = match.lastgroup if match.lastgroup != "generation" else "mode"
        if kind in ("reboot", "pay"):
            found.append(Request("reboot_device" if kind == "reboot" else "make_payment"))
            verb = kind
        elif kind in _VERBS:
            verb, condition = kind, False
        elif kind == "if":
            condition = verb != "check"
        elif kind in ("yes", "no"):
            if waiting and not condition:
                found += _ask("on" if kind == "yes" else "off", waiting, app)
        elif kind == "mode":
            if verb in ("turn", "on", "ensure") and not condition:
                found.append(Request("set_network_mode_preference", {"mode": _mode(match)}))
        elif kind == "permission":
            if verb in ("grant", "turn", "on", "ensure") and not condition:
                found.append(Request("grant_app_permission", {**app, "permission": match[0]}))
        else:
            topic = topic if kind == "it" else kind
            if topic is None or condition:
                continue
            waiting = topic if verb in ("turn", "ensure") else None
            found += _ask(verb, topic, app)
    if waiting in SWITCHES and not any(request.tool == waiting for request in found):
        found += _ask("check" if verb == "ensure" else "flip", waiting, app)
    return found, verb, topic


def _mode(match: re.Match[str]) -> str:
    """Return the network mode that words such as "4G/5G" or "3G only" mean."""
    generation, only = match["generation"], "only" in match[0]
    if generation in "23" or (generation == "4" and only):
        return f"{generation}g_only"
    return "4g_5g_preferred"


def _ask(verb: str | None, topic: str, app: dict[str, str]) -> list[Request]:
    """Return the request that a verb makes of an object, if the two make sense together."""
    if verb == "check":
        if topic in SWITCHES:
            return [Request(SWITCHES[topic].reader)]
        if topic in ("check_app_permissions", "check_app_status"):
            return [Request(topic, app)]
        return [Request("check_vpn_status" if topic == "vpn" else topic)]
    if verb in ("on", "off"):
        if topic in SWITCHES:
            return [Request(topic, on=verb == "on")]
        return [Request("connect_vpn" if verb == "on" else "disconnect_vpn")] if topic == "vpn" else []
    if verb == "flip":
        return [Request(topic)]
    if (verb, topic) == ("turn", "check_apn_settings"):
        return [Request("set_apn_settings", {"apn_settings": {"apn_name": "internet"}})]
    fixes = {("reset", "check_apn_settings"): "reset_apn_settings", ("reseat", "check_sim_status"): "reseat_sim_card"}
    tool = fixes.get((verb or "", topic))
    return [Request(tool)] if tool else []


# --- Reporting a tool result -----------------------------------------------------------------------------------

_STATUS = {
    "Airplane Mode": "Airplane mode",
    "SIM Card Status": "SIM",
    "Cellular Connection": "Connection",
    "Cellular Signal": "Signal",
    "Cellular Network Type": "Network",
    "Mobile Data Enabled": "Mobile data",
    "Data Roaming Enabled": "Data roaming",
    "Wi-Fi Radio": "Wi-Fi",
}
_WORDS = {"Yes": "on", "No": "off", "ON": "on", "OFF": "off"}
_PERSON = ((r"\bYour\b", "My"), (r"\byour\b", "my"), (r"\b[Yy]ou do not\b", "I do not"), (r"\bYou have\b", "I have"))


def first_person(text: str) -> str:
    """Turn the second person of a tool result into the user's own words."""
    for pattern, word in _PERSON:
        text = re.sub(pattern, word, text)
    return text


def status_bar(result: str) -> str:
    """Return the status bar in a tool result as words, such as "excellent signal, 5G, data enabled", or ""."""
    words = []
    for part in filter(None, result.partition("Status Bar: ")[2].split(" | ")):
        text = part.encode("ascii", "ignore").decode().strip()
        level = text.lower() in ("poor", "fair", "good", "excellent")
        words.append(f"{text.lower()} signal" if level else f"battery {text}" if text.endswith("%") else text)
    return ", ".join(words)


def report(tool: str, result: str) -> str:
    """Return a tool result as one or two short sentences in the first person, without the status bar of an action."""
    if tool == "check_status_bar":
        return f"Status bar: {status_bar(result)}."
    if tool == "check_network_status":
        values = dict(line.split(": ", 1) for line in result.splitlines() if ": " in line)
        words = {key: _WORDS.get(value, value.replace("_", " ")) for key, value in values.items()}
        return " ".join(f"{name}: {words[key]}." for key, name in _STATUS.items() if key in words)
    body = result.partition("Status Bar: ")[0]
    if tool == "run_speed_test" and "Mbps" in body:
        body = body.partition(").")[0] + ")."
    elif tool == "reboot_device":
        body = "I rebooted my phone." + (" The APN settings were reset." if "APN" in body else "")
    elif tool == "check_apn_settings":
        body = body.partition("(These are")[0]
    elif tool == "check_vpn_status" and "Details" in body:
        level = re.search(r"server_performance.*?'(\w+)'", body)
        body = "VPN is ON and connected." + (f" Server performance: {level[1]}." if level else "")
    lines = [first_person(line.strip(" -")) for line in body.splitlines() if line.strip()]
    return " ".join(line if line.endswith((".", "!", "?", ":")) else f"{line}." for line in lines)
