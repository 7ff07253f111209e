"""What applications do, through the official client. Each function is one check; its name says what must hold."""

import asyncio

import openai

from processes import wait_until

CHATS = 32
TOKENS = 32


class Context:
    def __init__(self, cluster, client):
        self.cluster = cluster
        self.client = client
        self.model = client.models.list().data[0].id

    def chat(self, text="Name three colours.", **more):
        more = {"max_tokens": 16, **more}
        return self.client.chat.completions.create(model=self.model, messages=[user(text)], **more)

    def completion(self, prompt="The sea is", **more):
        more = {"max_tokens": 16, **more}
        return self.client.completions.create(model=self.model, prompt=prompt, **more)

    def asynchronous(self):
        return openai.AsyncOpenAI(base_url=self.cluster.url + "/v1", api_key="none", max_retries=0, timeout=600)

    def wait_until_idle(self):
        def idle():
            ledgers = self.cluster.ledgers().values()
            engines = [ledger["engine"] for ledger in ledgers if "engine" in ledger]
            held = sum(engine["pages_held"] + engine["queued"] for engine in engines)
            return held == 0 and all(ledger.get("tasks", 0) == 0 for ledger in ledgers)

        wait_until(idle, "all pages are free and no task runs")


def user(text):
    return {"role": "user", "content": text}


def equal(found, expected):
    assert found == expected, f"{found!r} is not {expected!r}"


def models_are_listed(context):
    equal(context.client.models.retrieve(context.model).id, context.model)
    equal(context.client.models.list().data[0].object, "model")


def a_streamed_chat_says_what_a_plain_one_says(context):
    how = {"seed": 5, "temperature": 0.8, "max_tokens": 24}
    plain = context.chat(**how)
    chunks = list(context.chat(**how, stream=True, stream_options={"include_usage": True}))
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    equal(told[0].delta.role, "assistant")
    equal("".join(choice.delta.content or "" for choice in told), plain.choices[0].message.content)
    equal(told[-1].finish_reason, plain.choices[0].finish_reason)
    equal([choice.finish_reason for choice in told[:-1]], [None] * (len(told) - 1))
    usage = chunks[-1].usage
    equal((usage.prompt_tokens, usage.completion_tokens), (plain.usage.prompt_tokens, plain.usage.completion_tokens))
    assert plain.choices[0].message.content, "an answer has text"
    equal(len({chunk.id for chunk in chunks}), 1)


def a_streamed_completion_says_what_a_plain_one_says(context):
    how = {"prompt": ["The sea is", "One, two,"], "n": 2, "seed": 9, "max_tokens": 12}
    plain = context.completion(**how)
    texts = {}
    for chunk in context.completion(**how, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    equal(texts, {choice.index: choice.text for choice in plain.choices})
    equal(len(texts), 4)


def log_probabilities_have_the_shapes_of_the_api(context):
    choice = context.chat(temperature=0, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    for token in content:
        equal(len(token.top_logprobs), 3)
        equal(token.top_logprobs[0].token, token.token)
        assert token.logprob <= 0 and token.logprob == token.top_logprobs[0].logprob, token
    shown = b"".join(bytes(token.bytes) for token in content if not token.token.startswith("<|"))
    equal(shown.decode(errors="replace"), choice.message.content)
    logprobs = context.completion(temperature=0, logprobs=2).choices[0].logprobs
    equal({len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs), len(logprobs.text_offset)}, {16})
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        equal(top[token], logprob)


def continuations_differ_and_the_first_is_that_of_one(context):
    how = {"seed": 3, "max_tokens": 12, "temperature": 1}
    answer = context.chat(n=4, **how)
    texts = [choice.message.content for choice in answer.choices]
    equal([choice.index for choice in answer.choices], [0, 1, 2, 3])
    assert len(set(texts)) > 1, texts
    one = context.chat(**how)
    equal(texts[0], one.choices[0].message.content)
    equal(answer.usage.prompt_tokens, one.usage.prompt_tokens)


def a_seed_decides_the_answer(context):
    texts = [context.completion(seed=seed, temperature=1).choices[0].text for seed in (1, 1, 2, 3)]
    equal(texts[0], texts[1])
    assert len(set(texts)) > 1, texts


def a_stop_string_never_shows(context):
    how = {"temperature": 0, "max_tokens": 32}
    whole = context.completion(**how).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    before = whole.split(stop)[0]
    stopped = context.completion(stop=stop, **how)
    equal((stopped.choices[0].text, stopped.choices[0].finish_reason), (before, "stop"))
    assert stopped.usage.completion_tokens < 32, "nothing is computed after it"
    text = ""
    for chunk in context.completion(stop=[stop, "no such text"], stream=True, **how):
        text += chunk.choices[0].text
        assert before.startswith(text), f"{text!r} of {before!r}"
    equal(text, before)


def an_answer_ends_by_length(context):
    answer = context.chat(max_tokens=3, extra_body={"ignore_eos": True})
    equal((answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 3))
    answer = context.client.chat.completions.create(
        model=context.model, messages=[user("Count.")], max_completion_tokens=2, extra_body={"ignore_eos": True}
    )
    equal(answer.usage.completion_tokens, 2)
    equal(context.client.completions.create(
        model=context.model, prompt="A", extra_body={"ignore_eos": True}
    ).usage.completion_tokens, 16)


def ids_are_as_good_as_text(context):
    how = {"temperature": 0, "extra_body": {"return_token_ids": True}}
    by_text = context.completion(**how)
    ids = by_text.model_extra["prompt_token_ids"]
    by_ids = context.completion(prompt=ids, **how)
    equal(by_ids.choices[0].text, by_text.choices[0].text)
    equal(by_ids.choices[0].model_extra["token_ids"], by_text.choices[0].model_extra["token_ids"])
    equal(by_ids.usage.prompt_tokens, len(ids))
    both = context.completion(prompt=[ids, ids[:1]], **how)
    equal((both.choices[0].text, len(both.choices)), (by_text.choices[0].text, 2))
    streamed = []
    for chunk in context.completion(stream=True, **how):
        streamed += chunk.choices[0].model_extra["token_ids"]
    equal(streamed, by_text.choices[0].model_extra["token_ids"])


def a_message_may_come_in_parts(context):
    def ask(content):
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": content}]
        answer = context.client.chat.completions.create(
            model=context.model, messages=messages, max_tokens=8, temperature=0
        )
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    equal(ask([{"type": "text", "text": "Name a "}, {"type": "text", "text": "bird."}]), ask("Name a bird."))


def crowd(context, chats, tokens):
    """Chats of so many tokens, all at once, half of them streamed; their texts, and how one of them is asked."""

    def how(number):
        return {
            "model": context.model,
            "messages": [user(f"Tell me about the number {number}.")],
            "max_tokens": tokens,
            "seed": number,
            "extra_body": {"ignore_eos": True},
        }

    async def one(client, number):
        if number % 2:
            return (await client.chat.completions.create(**how(number))).choices[0].message.content
        text = ""
        async for chunk in await client.chat.completions.create(**how(number), stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them():
        async with context.asynchronous() as client:
            return await asyncio.gather(*(one(client, number) for number in range(chats)))

    return asyncio.run(all_of_them()), how


def many_at_once_are_answered_as_one_alone(context):
    texts, how = crowd(context, CHATS, TOKENS)
    assert all(texts), "every chat has an answer"
    for number in (0, CHATS - 1):
        alone = context.client.chat.completions.create(**how(number))
        equal((texts[number], alone.usage.completion_tokens), (alone.choices[0].message.content, TOKENS))


def a_client_that_closes_its_stream_frees_everything(context):
    stream = context.chat("Tell a long story.", max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    for _, chunk in zip(range(4), stream):
        assert chunk.choices
    stream.close()
    context.wait_until_idle()


def a_client_that_gives_up_waiting_frees_everything(context):
    how = {"model": context.model, "prompt": "The sea is", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}

    async def give_up():
        async with context.asynchronous() as client:
            task = asyncio.create_task(client.completions.create(**how))
            while not any(ledger.get("tasks") for ledger in (await asyncio.to_thread(context.cluster.ledgers)).values()):
                assert not task.done(), "it was to take longer"
                await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(give_up())
    context.wait_until_idle()


def refused(call, kind, param=None, code=None):
    """The error of a call that has to be refused."""
    try:
        call()
    except kind as error:
        equal((error.param, error.code), (param, code))
        equal((error.body["blame"], error.type), ("caller", "invalid_request_error"))
        assert error.body["stage"] in ("request", "admission"), error.body
        return error.body["message"]
    raise AssertionError("it was not refused")


def wrong_fields_are_named(context):
    for field, value in {
        "n": 0,
        "temperature": 3,
        "top_p": 2,
        "max_tokens": 0,
        "stop": ["a", "b", "c", "d", "e"],
        "seed": "x",
        "stream": "yes",
        "logprobs": 9,
        "echo": True,
        "best_of": 3,
        "logit_bias": {"5": 1},
        "presence_penalty": 1,
    }.items():
        refused(lambda: context.completion(**{field: value}), openai.BadRequestError, field)
    for field, value in {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "response_format": {"type": "json_object"},
        "top_logprobs": 2,
        "max_completion_tokens": 0,
    }.items():
        refused(lambda: context.chat(**{field: value}), openai.BadRequestError, field)
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    refused(
        lambda: context.client.chat.completions.create(model=context.model, messages=picture),
        openai.BadRequestError,
        "messages[0].content[0]",
    )
    refused(lambda: context.completion(prompt=[10_000_000]), openai.BadRequestError, "prompt")


def a_prompt_that_never_fits_is_told_the_limit(context):
    for call, param in (
        (lambda: context.completion(prompt=[5] * 20_000), "prompt"),
        (lambda: context.completion(prompt=[5] * 20_000, stream=True), "prompt"),
        (lambda: context.chat("word " * 20_000, n=2), "messages"),
    ):
        message = refused(call, openai.BadRequestError, param, "context_length_exceeded")
        assert "limit" in message and "shorten" in message, message


def other_models_and_paths_are_not_found(context):
    message = refused(
        lambda: context.client.completions.create(model="gpt-4o", prompt="a"),
        openai.NotFoundError,
        "model",
        "model_not_found",
    )
    assert context.model in message, message
    refused(lambda: context.client.models.retrieve("gpt-4o"), openai.NotFoundError, "model", "model_not_found")
    refused(
        lambda: context.client.embeddings.create(model=context.model, input="a"),
        openai.NotFoundError,
        None,
        "unknown_url",
    )


def usage_tells_of_cached_tokens(context):
    details = context.chat().usage.prompt_tokens_details
    assert details.cached_tokens >= 0, details


ALL = [
    models_are_listed,
    a_streamed_chat_says_what_a_plain_one_says,
    a_streamed_completion_says_what_a_plain_one_says,
    log_probabilities_have_the_shapes_of_the_api,
    continuations_differ_and_the_first_is_that_of_one,
    a_seed_decides_the_answer,
    a_stop_string_never_shows,
    an_answer_ends_by_length,
    ids_are_as_good_as_text,
    a_message_may_come_in_parts,
    many_at_once_are_answered_as_one_alone,
    a_client_that_closes_its_stream_frees_everything,
    a_client_that_gives_up_waiting_frees_everything,
    wrong_fields_are_named,
    a_prompt_that_never_fits_is_told_the_limit,
    other_models_and_paths_are_not_found,
    usage_tells_of_cached_tokens,
]
