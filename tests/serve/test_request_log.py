"""Ids, log lines and deadlines, without Ray."""

import json
import logging

import pytest

from sam3_ray.serve.routes import SECURITY_HEADERS, http_app
from tests.serve.fakes import LIMITS, Web, assert_problem

BODY = {"image_digest": "0123456789abcdef" * 2, "prompts": ["car"]}


@pytest.fixture
def web() -> Web:
    return Web()


@pytest.mark.parametrize("given", ["abc-1", "a" * 128, "trace/1:2+3="])
def test_a_clients_id_comes_back(web, given):
    assert web.post(json=BODY, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a" * 129, "a b", 'a"', "é".encode("latin-1")])
def test_an_id_that_might_forge_a_line_is_replaced(web, given):
    headers = {} if given is None else {"x-request-id": given}
    made = {web.post(json=BODY, headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(len(one) == 32 for one in made)


def test_an_id_that_is_answered_in_front_is_not_said_twice():
    web = Web()
    web.app = http_app(web.service, LIMITS, 5.0, id_is_answered=True)
    assert "x-request-id" not in web.post(json=BODY, headers={"x-request-id": "r1"}).headers
    assert len(web.post(json=BODY, headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32


def test_what_nobody_foresaw_has_an_id_a_line_and_all_headers(caplog):
    web, counted = Web(), []
    web.app = http_app(
        web.service, LIMITS, 5.0, count=counted.append, cors_origins=["http://page.test"]
    )
    headers = {"x-request-id": "r1", "origin": "http://page.test"}
    with caplog.at_level(logging.INFO, "sam3_ray.requests"):
        response = web.post(json=BODY | {"prompts": ["crash"]}, headers=headers)
    assert_problem(response, 500, "internal-error", "ZeroDivisionError")
    assert response.headers["x-request-id"] == "r1"
    assert response.headers["access-control-allow-origin"] == "http://page.test"
    assert {name.decode() for name, _ in SECURITY_HEADERS} <= set(response.headers)
    (line,) = (json.loads(r.message) for r in caplog.records if r.name == "sam3_ray.requests")
    assert (line["id"], line["status"], line["problem"]) == ("r1", 500, "internal-error")
    assert counted == [500]


def test_one_line_a_request(web, caplog):
    with caplog.at_level(logging.INFO, "sam3_ray.requests"):
        web.post(json=BODY, headers={"x-request-id": "r1"})
        web.post(json=BODY | {"typo": 1})
        web.post(json=BODY | {"prompts": ["fail"]})
        web.call("GET", "/nothing")
    lines = [json.loads(record.message) for record in caplog.records]
    assert [line["status"] for line in lines] == [200, 422, 503, 404]
    assert (lines[0]["id"], lines[0]["digest"], lines[0]["prompts"]) == ("r1", "01234567", 1)
    assert [line.get("problem") for line in lines] == [
        None,
        "invalid-request",
        "over-capacity",
        None,
    ]
    assert all(line["ms"] >= 0 for line in lines)


def test_a_deadline_of_the_clients(web):
    response = web.post(json=BODY | {"prompts": ["slow"]}, headers={"x-request-timeout-ms": "50"})
    assert_problem(response, 504, "deadline-exceeded", "within 0.05 s")
    assert web.service.cancelled == 1


def test_a_deadline_is_never_longer_than_the_configurations():
    web = Web(deadline_s=0.1)
    headers = {"x-request-timeout-ms": "999999"}
    response = web.post(json=BODY | {"prompts": ["slow"]}, headers=headers)
    assert_problem(response, 504, "deadline-exceeded", "within 0.1 s")


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "1" * 13, "²"])
def test_a_deadline_that_is_none(web, value):
    headers = {"x-request-timeout-ms": value.encode()}
    response = web.post(json=BODY, headers=headers)
    assert_problem(response, 422, "invalid-request", "milliseconds")
