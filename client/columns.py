"""What a site tells of its data's columns in the roll call: a hash of their names, and the sums that a run asks for.

Names and sums leave as the site's policy says (`statistics`); which columns differ from the run's is for its log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from client.policy import Policy
from client.session import Session
from common.data.columns import difference, listed
from common.data.examples import ClientData
from common.data.moments import Census
from common.errors import Denied, SiteError
from strategies.protocol.members import names_of
from strategies.protocol.messages import RollHead, hash_of_columns

log = logging.getLogger("client.app")


def told(session: Session, head: RollHead, names: list[str], file: str, policy: Policy, own: bool) -> dict[str, Any]:
    """Fields of the answer to a roll call for the clients that this node hosts, beside those of `Session.roll`.

    `own`: server and site are one owner's, who hides nothing from himself. Raises SiteError for columns that are not
    the run's, and Denied for sums that the policy does not let out.
    """
    held = [session.data(name, file) for name in names]
    columns = next((each.columns for each in held if each.columns), ())
    if columns and "" not in session.told:
        session.told[""] = ""
        log.info("the columns that are learnt from, in order: %s", listed(columns))
    wanted = names_of(head.columns) if head.columns else None
    if columns and wanted is not None and (differs := difference(columns, wanted)):
        raise SiteError("data-columns", f"{file} {differs}; the run learns from {listed(wanted)}", differs)
    fields: dict[str, Any] = {"columns_hash": hash_of_columns(head.run, columns) if policy.share_schema else ""}
    if columns and policy.share_schema and (own or policy.statistics):
        fields["columns"] = json.dumps(columns)
    census = session.task.census
    if census is not None:
        census.adopt(head.facts)
        if not head.facts:
            fields["sums"] = [_sums(session, census, *each, policy, own) for each in zip(names, held, strict=True)]
    return fields


def _sums(session: Session, census: Census, name: str, data: ClientData, policy: Policy, own: bool) -> str:
    """A client's sums: the same ones however often they are asked for."""
    if not (policy.statistics if policy.statistics is not None else own):
        raise Denied(
            "statistics-denied",
            "the experiment asks for mean and deviation of columns (task.standardize, task.missing), and the site's "
            "policy does not allow statistics: statistics = true",
        )
    if name not in session.told:
        from client.statistics import count_answer  # readers of tables: memory that few sites ever need

        session.told[name] = census.tell(data.train, count_answer(policy, own), policy.statistics_digits)
    return session.told[name]


def stand_in(session: Session, datas: Sequence[ClientData]) -> None:
    """Take a site's own sums for those of all, to try a batch before there is a run."""
    census = session.task.census
    if census is not None and any(len(data.train) for data in datas):
        census.adopt(census.settle({str(i): census.tell(data.train) for i, data in enumerate(datas)}))
