"""Data URLs and web addresses as clients send them."""

import pytest

from perilune.config.media import MediaConfig
from perilune.errors import RequestError
from perilune.text.images.picture import ImageLimits
from perilune.text.images.reader import ImageReader
from tests.text.images.pictures import data_url, file_of, photo

FIELD = "messages[0].content[0].image_url.url"
PNG = file_of(photo(60, 40))


def reader(**options):
    return ImageReader(MediaConfig(), **options)


def refusal(url, **options):
    with pytest.raises(RequestError) as raised:
        reader(**options).open(url, FIELD)
    assert raised.value.param == FIELD
    return str(raised.value)


def test_a_data_url_is_opened():
    assert reader().open(data_url(PNG), FIELD).size.num_tokens == 6


@pytest.mark.parametrize("head", ["data:image/jpeg", "data:", "DATA:IMAGE/PNG;charset=x", "data:text/plain"])
def test_the_bytes_say_what_a_picture_is_whatever_the_url_says(head):
    url = f"{head};base64,{data_url(PNG).partition(',')[2]}"
    assert reader().open(url, FIELD).size.num_tokens == 6


def test_base64_may_be_wrapped_into_lines():
    head, _, payload = data_url(PNG).partition(",")
    wrapped = "\n".join(payload[i : i + 76] for i in range(0, len(payload), 76))
    assert reader().open(f"{head},{wrapped}", FIELD).size.num_tokens == 6


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("data:image/png;base64", "without base64"),
        ("data:image/png,abc", "without base64"),
        ("data:image/png;base64,", "0 bytes"),
        ("data:image/png;base64,!!!!", "no valid base64"),
        ("data:image/png;base64,iVBORw0KGgo", "no valid base64"),
        ("data:image/png;base64,ü", "no valid base64"),
        ("file:///etc/passwd", "send the picture as data:image/png;base64"),
        ("ms://file-1", "send the picture as data:image/png;base64"),
        ("cat.png", "send the picture as data:image/png;base64"),
        ("", "send the picture as data:image/png;base64"),
        ("https://example.org/cat.png", "--allow-image-urls"),
    ],
)
def test_what_is_no_data_url_is_refused(url, text):
    assert text in refusal(url)


def test_a_picture_that_is_too_large_is_refused_before_it_is_decoded():
    assert "at most 100 are allowed" in refusal(data_url(PNG), limits=ImageLimits(max_bytes=100))


def test_one_request_holds_a_bounded_number_of_pictures():
    opener = reader(limits=ImageLimits(max_images=9))
    for _ in range(9):
        opener.open(data_url(PNG), FIELD)
    with pytest.raises(RequestError, match="one picture more than 9"):
        opener.open(data_url(PNG), FIELD)


def test_all_web_addresses_of_a_request_share_one_limit_of_time(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("perilune.text.images.reader.time.monotonic", lambda: now_s[0])

    def fetch(url, field, max_bytes):
        now_s[0] += 3
        return PNG

    opener = reader(allows_web=True, fetch=fetch)
    for _ in range(2):
        opener.open("https://example.org/cat.png", FIELD)
    with pytest.raises(RequestError, match="after 5 s of fetching"):
        opener.open("https://example.org/cat.png", FIELD)


def test_web_addresses_are_fetched_where_that_is_allowed():
    asked = []

    def fetch(url, field, max_bytes):
        asked.append((url, field, max_bytes))
        return PNG

    opener = reader(allows_web=True, fetch=fetch, limits=ImageLimits(max_bytes=9000))
    assert opener.open("https://example.org/cat.png", FIELD).size.num_tokens == 6
    assert asked == [("https://example.org/cat.png", FIELD, 9000)]
