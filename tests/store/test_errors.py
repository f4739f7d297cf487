"""What an error may tell."""

from __future__ import annotations

import pytest

from ds_ckpt_store.errors import AccessError


@pytest.mark.parametrize(
    "answer",
    [
        "got Authorization: Bearer SECRET",
        "headers {'X-Amz-Security-Token': 'SECRET', 'Host': 'h'}",
        "X-Amz-Security-Token=SECRET&X-Amz-Date=1",
        "GET /c?sv=1&sig=SECRET&se=2 refused",
        "https://h/o?X-Amz-Signature=SECRET<br>",
        "<Message>x-goog-iam-authorization-token: SECRET</Message>",
        "authorization:AWS4-HMAC-SHA256 Credential=a, Signature=SECRET\r\nHost: h",
    ],
)
def test_credentials_that_a_server_sends_back_are_left_out(answer: str) -> None:
    error = AccessError("put", "key", answer)
    for text in (str(error), error.answer, repr(error)):
        assert "SECRET" not in text
        assert "..." in text


def test_all_else_stays_as_it_was_told() -> None:
    answer = "403 AccessDenied: the signature we calculated does not match; authorization failed"
    assert AccessError("put", "key", answer).answer == answer
