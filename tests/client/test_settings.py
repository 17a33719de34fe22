"""The partner's settings."""

from __future__ import annotations

import pickle

import pytest

from sampling_async import DecodeError, MemberURL, PartnerSettings, Setting

URLS = {
    "Qualified URL": "qualified_url",
    "Terminate URL": "terminate_url",
    "Quota Full URL": "quota_full_url",
    "Fraud Terminate URL": "fraud_terminate_url",
    "Digital Finger Printing Failure URL": "digital_finger_printing_failure_url",
    "No Surveys URL": "no_surveys_url",
    "Survey Taken URL": "survey_taken_url",
    "No Cookies URL": "no_cookies_url",
    "Survey Not Available URL": "survey_not_available_url",
    "Not Qualified URL": "not_qualified_url",
    "Max Surveys Reached URL": "max_surveys_reached_url",
    "Invite Notification URL": "invite_notification_url",
    "Completion Notification URL": "completion_notification_url",
    "Terminate Notification URL": "terminate_notification_url",
    "Survey Notification URL": "survey_notification_url",
    "Quota Notification URL": "quota_notification_url",
}


def settings(**values: str | None) -> PartnerSettings:
    return PartnerSettings([Setting(name, "", value) for name, value in values.items()])


@pytest.mark.parametrize(("name", "attribute"), URLS.items())
def test_urls_are_typed(name, attribute):
    assert getattr(settings(**{name: "https://p.example/?m=[pid]"}), attribute) == "https://p.example/?m=[pid]"
    assert getattr(settings(), attribute) is None
    assert getattr(settings(**{name: None}), attribute) is None
    assert getattr(settings(**{name: ""}), attribute) is None


def test_the_member_is_filled_in_percent_encoded():
    url = MemberURL("https://p.example/[pid]?m=[pid]")
    assert url.for_member("a b/&é") == "https://p.example/a%20b%2F%26%C3%A9?m=a%20b%2F%26%C3%A9"


def test_numbers_and_flags_are_typed():
    read = settings(**{"Max Surveys To Fetch": " 0", "Quota Notifications Enabled": "True "})
    assert (read.max_surveys_to_fetch, read.quota_notifications_enabled) == (0, True)
    assert settings(**{"Quota Notifications Enabled": "false"}).quota_notifications_enabled is False
    assert settings().max_surveys_to_fetch is None
    assert settings().quota_notifications_enabled is None


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "1" * 19, "٣"])
def test_an_invalid_number_is_refused(value):
    with pytest.raises(DecodeError, match=r"^\$\['Max Surveys To Fetch'\]\.Value: expected a whole number$"):
        _ = settings(**{"Max Surveys To Fetch": value}).max_surveys_to_fetch


def test_an_invalid_flag_is_refused():
    with pytest.raises(
        DecodeError, match=r"^\$\['Quota Notifications Enabled'\]\.Value: expected True or False$"
    ):
        _ = settings(**{"Quota Notifications Enabled": "yes"}).quota_notifications_enabled


def test_other_settings_are_plain_texts():
    read = settings(**{"Panel GUID": "g", "Standard EncryptionResult Parameter Name": "enc"})
    assert (read.panel_guid, read.standard_encryption_result_parameter_name) == ("g", "enc")


def test_names_are_found_without_case_and_blanks_and_the_first_counts():
    read = PartnerSettings([Setting("Panel GUID ", "", "first"), Setting("panelguid", "", "second")])
    assert read.value("PANEL guid") == "first"
    assert read.get("panel guid") is read[0]
    assert read.get("nothing") is None


def test_the_reference_data_key_can_be_had_and_is_never_shown():
    read = settings(**{"Reference Data API Auth Key": "s3cret"})
    assert read.reference_data_api_auth_key == "s3cret"
    assert "s3cret" not in f"{read!r} {read} {list(read)}"
    assert repr(read[0]) == "Setting(name='Reference Data API Auth Key', description='', value=<hidden>)"


def test_settings_are_a_sequence_and_compare_by_value():
    read = settings(a="1", b="2")
    assert [s.name for s in read] == [s.name for s in read[0:2]] == ["a", "b"]
    copy = pickle.loads(pickle.dumps(read))
    assert (copy, hash(copy), len(copy)) == (read, hash(read), 2)
    assert read != list(read)


def test_different_settings_have_different_hashes():
    one, same, other = ([Setting(name="Qualified URL", value=value)] for value in ("a", "a", "b"))
    hashes = [hash(PartnerSettings(settings)) for settings in (one, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_repr_fits_a_line_and_names_the_first():
    settings = PartnerSettings([Setting(f"Setting {n}", "d" * 80, "v" * 80) for n in range(21)])
    assert repr(settings).startswith("PartnerSettings('Setting 0', ")
    assert "<16 more>" in repr(settings)
    assert len(repr(settings)) < 120
