"""Every numbered requirement in one line of our own words; `coverage.py` beside it lists the tests
that show each.

C capabilities, D defects of the older client that are not to be repeated, 24 the edge cases of its
acceptance list, W weaknesses of the official client, S rules of a server, Q surprises of the older
client's extras, 1 what surrounds the core (section/row of its list), 4 what was asked for beyond
it, 1.16 the command line, U what changed with version 0.38 of the official client, K the fleet.
Where the design decided otherwise than the older clients, the words here are what was decided.
"""

from __future__ import annotations

CAPABILITIES = """
C01 settings in four tiers: argument, program default, environment, built-in; the first one set wins
C02 settings that make no sense are refused when given, with a message that names them
C03 two presets of timeout and retries, by argument, program or environment; explicit values win
C04 a proxy as URL or parts, ports, name and password as a header, for every connection
C05 keys are masked and secret headers redacted wherever settings are shown
C06 the environment: trimmed, blank is unset, fixed forms of flags, lists and JSON, a snapshot
C07 a log level is applied once, at the start; without one logging is left alone
C08 the package's version and the protocol's are two numbers, and the protocol's goes on the wire
C09 one tree of errors: type, status, category, whose fault it is, whether trying again may help
C10 everything shared is started on first use, once, however many start it at the same time
C11 connections by class of traffic, so none starves another; addresses compared without case
C12 one way to make a request that every endpoint goes through, and that can be replaced
C13 the base URL's path stays; query: defaults, then the path's, then the call's; no None
C14 the headers of every request, in an order in which the later one wins
C15 an idempotency key unless it is a GET: the same over a call's retries, new for each call
C16 the trace context travels when asked for, and never breaks a request
C17 a body is JSON or, with files, multipart; one that cannot be prepared is the caller's error
C18 what was not given, what is to be left out and None are three things in a body
C19 compressed answers are read
C20 each status has its outcome: data, nothing, a redirect's address, a typed error with text
C21 Retry-After in seconds or milliseconds, any letter case; what cannot be read falls back
C22 which statuses are tried again, how often and after which waits; the server may overrule
C23 an answer with its status, headers, time and retries beside the data
C24 server-sent events: fed in any pieces, all line ends, comments, several data lines
C25 requests can be logged, with secrets redacted
C26 events of a request: start, stop with duration and retries, exception; with metadata
C27 the catalogue of endpoints: method, path, body, query, timeout and retries of each
C28 telemetry is posted in the background, and failures are only logged; or waited for
C29 creating a session: its fields on the wire, bounded in time, a bad answer is an error
C30 heartbeats: every ten seconds, kept through every kind of failure, a warning after two minutes
C31 heartbeats can be given up after so many failures or so long
C32 after a session is closed there is no further heartbeat
C33 a service client opens one session and closes what it opened
C34 a LoRA training run is created with its number in the session
C35 a LoRA configuration of parts; one that trains nothing is refused before anything is sent
C36 a run from a saved state, with or without its optimizer; rank and flags from the checkpoint
C37 a sampling client of a base model or a checkpoint; neither is refused
C38 what the server offers
C39 a REST client from a service client
C40 async twins of all creators
C41 a run is bound to its model before it is handed out; a server may answer with a future
C42 operations of a run are numbered from one and submitted in order, results awaited apart
C43 large calls are cut by number of examples and by bytes, never into an empty piece
C44 forward_backward: outputs in order, metrics, gradient added
C45 forward: the same without a gradient
C46 optim_step applies the gradient
C47 what makes no sense is refused before a request is made: loss, settings, time to live
C48 a training state is saved under a name, for a time if asked
C49 a state is loaded, with or without its optimizer
C50 weights are saved for sampling
C51 a sampler of the weights as they are, in one call
C52 a sampling client of a path from a training client
C53 what a run trains; a run can be let go
C54 a training client's tokenizer, by the model's name or the server's word
C55 custom losses: forward, the user's function, a second pass with minus its gradient
C56 a fault in the background becomes an error of its own call, and the client lives on
C57 waiting for a result: how it is asked for, with which headers
C58 all forms of an answer to a poll are told apart; an unknown one is an error
C59 a budget of bytes for results being fetched, shared by server and key
C60 a refusal without a reason while polling is tried again a few times
C61 waits between polls can be chosen
C62 waiting with a time limit; waiting for many, in order, whatever becomes of each
C63 events of polls: failures and changes of the queue's state
C64 results of chunks are joined in order; differing kinds are warned about
C65 metrics of chunks are reduced by what their names end in
C66 a sampling client is bound to a sampling session, or given one
C67 sample: options, numbers from zero
C68 one sample's way: gate, pause, submit, wait, parse
C69 a pause after back-pressure, shared by all clients of a server and key, kept from others
C70 a gate for submissions: so many, fewer after back-pressure, so many bytes
C71 a byte budget that one large holder may overdraw; waiters in order
C72 samples are tried again: waits, bounds, a time without progress
C73 a bound on samples tried at once
C74 back-pressure pauses by the prompt's size or as long as the server asks, and its reason is told
C75 log-probabilities of a prompt
C76 samples as a stream, token by token
C77 a sampling client's tokenizer
C78 sizes are estimated: text, images, pointers, tensors
C79 every REST method and its async twin
C80 a scope is owned or accessible; others are refused before a request is made
C81 an archive that is being packed is asked for again, so often and so far apart
C82 checkpoint paths are taken apart, and others refused
C83 a time to live is checked before a request is made, and None is sent
C84 changes of the queue's state reach an observer, which may fail
C85 a paused queue is logged with its reason, once a minute
C86 a general way to try again: waits, jitter, progress, events
C87 the retry policy's numbers can be read
C88 a circuit breaker: closed, open, half open
C89 breakers by name, shared by threads
C90 the types: fields, defaults, checks, wire forms
"""

DEFECTS = """
D01 no empty first chunk when the first example alone is too big
D02 a sampler of a sampling session needs neither path nor base model
D03 saving for sampling always gives the typed answer
D04 a run whose state could not be loaded is closed, and its number is not used again
D05 is_lora false stays false
D06 a future of unknown form, or a failure without words, is an error and not a crash
D07 streams are streamed, compressed or not, without nulls, with the default query
D08 a stream of events with a bad status is an error
D09 a half-open breaker reserves its probe first, and counts exceptions
D10 closing a child client leaves the session's reporter alone
D11 one slow heartbeat does not delay the others
D12 only what may pass is tried again; an answer out of form is final
D13 numbers only go up, whatever is refused
D14 the configured proxy is used
D15 429 while polling backs off
D16 compute_logprobs honours its options
D17 one blank after a colon is dropped from an event, not all; a comment alone is no event
D18 a model that is created by a future is waited for
D19 a redirect that gave its address is a success
D20 Retry-After is bounded, and dates are understood
D21 times in bodies are ISO 8601
D22 a time limit is honoured by every call alike
D23 a heartbeat says its type
D24 try_again in any letter case is no result
D25 means over no outputs are zero
D26 a longer pause is not shortened by a later one
D27 the order of calls is the order in which they were made
D28 gate permits are held while submitting, not while waiting for results
D29 a pause is looked at again after waking
D30 no hidden limit of five seconds on any call
D31 a sample's limits for the exchange and for the result are two things
D32 opening a session is bounded in time
D33 the numbers in the older client's notes on pools differ from its real ones
D34 409 is tried again by the exchange and is still the caller's error
"""

CHECKLIST = """
24.config.1 precedence of all four tiers, for each field
24.config.2 an explicit False or empty list counts as given
24.config.3 a key has its prefix
24.config.4 forms of a proxy, default ports, the header of its name and password
24.config.5 masks of short and long keys
24.config.6 secrets are neither in the repr nor in the log of requests
24.config.7 the default feature gate
24.config.8 presets by argument, program and environment; an unknown one is the official client's
24.http.1 409, 408 and twice 503, then success
24.http.2 429 with retry-after-ms and with Retry-After in seconds, in any letter case
24.http.3 x-should-retry: false on 503, true on 400
24.http.4 one retry allowed is two requests
24.http.5 the category from the body; 422 is the user's fault and 500 the server's
24.http.6 refused connections and ones cut in the middle are connection errors
24.http.7 start and stop events with the class of traffic
24.http.8 twenty calls at once
24.http.9 Cloudflare headers present when configured, absent otherwise
24.http.10 which query wins
24.http.11 files make a body multipart
24.http.12 a wrapped answer's metadata
24.session.1 the project is on the wire
24.session.2 401 on heartbeats keeps the session, and warns after the window
24.session.3 a heartbeat fails with 500, then succeeds
24.session.4 a heartbeat without a connection pool is skipped with a warning
24.session.5 with no failures allowed the first one ends the heartbeats
24.session.6 a slow create_session within the timeout succeeds
24.session.7 a heartbeat has ten seconds and no retries whatever is configured
24.service.1 numbers 0 and 1 for two training clients and two sampling clients
24.service.2 rank, seed and flags are folded into the LoRA configuration
24.service.3 all flags false is refused, by both twins
24.service.4 a sampling client without a model is refused
24.service.5 flags are restored from the checkpoint's information
24.service.6 the variant with the optimizer
24.service.7 two services do not share anything of each other
24.training.1 1025 examples are two requests, numbers 1 and 2, joined
24.training.2 an invalid loss or setting makes no request
24.training.3 loss settings are brought to one form
24.training.4 a crash while polling is an error, and the client lives
24.training.5 background work without its supervisor is an error
24.training.6 a time to live of zero is refused
24.training.7 loading says whether the optimizer is wanted
24.training.8 a saved path comes from its name
24.training.9 save and sample with an answer of a path only, and of a session only; by both twins
24.training.10 images without a token count are sent
24.training.11 images of 4 MB and 3.5 MB are two requests
24.training.12 numbers of a whole run: forward 1 and 2, optim 3, save 4
24.custom.1 a sum of two log-probabilities gives weights of minus one
24.custom.2 forward has number 1, backward 2
24.custom.3 the user's metrics are merged
24.futures.1 each row of the poll's table: completed, pending, failed, try_again, deadline, 410, 400
24.futures.2 a connection error, then success, with one wait
24.futures.3 a held 408 is polled again at once, an early one and 5xx back off
24.futures.4 waits from a function of the caller
24.futures.5 a deadline gives the last failure
24.futures.6 metadata first, then the result
24.futures.7 two empty 400, then the result, in three requests
24.futures.8 an observer and an event hear the queue's reason
24.futures.9 410 with its category and the time it took
24.futures.10 waiting with a time limit
24.futures.11 waiting for many: order, one that crashes, one that stalls
24.sampling.1 number 0 is on the wire
24.sampling.2 429 pauses 1 s for a small prompt and 5 s for a large one, longer when the server asks
24.sampling.3 twenty samples after a 429 begin when the pause is over, with numbers of their own
24.sampling.4 accounts do not pause each other
24.sampling.5 clients of the same account share the pause
24.sampling.6 a concurrency of one lets one through
24.sampling.7 500 and 400 surface once without retries, and do not pause anybody
24.sampling.8 log-probabilities with None in them
24.sampling.9 the reason in a 429 is logged
24.sampling.10 a stream's chunks; 500 is an error; a closed client says so
24.rest.1 paths and parameters of every method
24.rest.2 an expiry as ISO 8601 and as an HTTP date
24.rest.3 an archive: 503, one wait, then the redirect
24.rest.4 a malformed path is refused
24.rest.5 scopes are checked
24.rest.6 the body of a time to live, to the letter
24.rest.7 403 and 404 surface
24.rest.8 async twins
24.types.1 enumerations are parsed
24.types.2 defaults
24.types.3 checks
24.types.4 what is None is left out where it has to be
24.types.5 round trips
24.types.6 times that are none stay as they are, or are refused in words
24.types.7 both forms of top-k entries
24.types.8 try_again is read strictly
24.code.1 gzip is read
24.code.2 the idempotency key stays the same over retries
24.code.3 the headers x-stainless, x-tinker and the one on back-pressure
24.code.4 a redirect without an address
24.code.5 x-should-retry on a good status
24.code.6 Retry-After as an HTTP date
24.code.7 empty 400 without end
24.code.8 a second answer of metadata only
24.code.9 the budget of response bytes holds fetches back
24.code.10 poll waits as a tuple and as the word exponential
24.code.11 404, 409 and 429 while polling
24.code.12 heartbeats given up after a time; sessions found again
24.code.13 ten at a time after back-pressure
24.code.14 429 and 410 make a sample be submitted again
24.code.15 a failed chunk ends the waiting for the later ones
24.code.16 custom losses: counts that differ, a loss that is no number, one that raises
24.code.17 empty data
24.code.18 a state that cannot be loaded into a new run
24.code.19 events split anywhere, with CR alone, with several data lines
24.code.20 error events in a stream
24.code.21 proxy settings on real connections
24.code.22 half-open breakers and calls at once
"""

WEAKNESSES = """
W01 a failed chunk does not wedge the client
W02 a cancelled or timed-out call does not wedge the client
W03 the key is in no telemetry, body or log
W04 the key does not follow redirects to another origin
W05 a nameless save sent again is the same request
W06 user code and encoding do not block the network loop
W07 async methods do not block the caller's loop
W08 errors do not wait for telemetry
W09 a failing or impatient server is not polled in a hot loop
W10 an unreachable server is named soon
W11 importing is quick, also for the command line
W12 BFLOAT16 tensors are read right
W13 the metrics reducer takes what comes
W14 configured timeouts are the real ones
W15 a client works, or says why it cannot, after a fork
W16 dropped clients stop their heartbeats
W17 errors have types and say what, where and why
W18 errors survive pickling
W19 connections of concurrent training requests are bounded
W20 an operation takes few round trips
W21 nothing is polled when nobody waits
W22 prompts are encoded cheaply
W23 409 is given up soon
W24 the same input follows the same rules everywhere
W25 every call returns a future that can be awaited and waited for
W26 a timeout means the same in threads and loops
W27 a rejected chunk leaves no partial batch behind
"""

SERVER_RULES = """
S1 passes as protobuf, plain or zstd, and as JSON; forward as JSON
S2 protobuf results where asked for, JSON for everything else
S3 conventions of protobuf bodies
S4 zstd bodies have a cap that is checked before memory is taken
S5 submissions give a receipt at once; samples with a name for each
S6 sessions, heartbeats, silence; checkpoints outlive them
S7 names of models; creating the same one again gives the same
S8 get_info, and a tokenizer that can be found offline
S9 LoRA: random A by seed, zero B, scale 32 over rank
S10 flags choose groups of layers; at least one
S11 order by number, whatever the order of arrival; a gap is given up in time
S12 the same request again is the same request; another under its number fails in band
S13 a failed operation uses its number up
S14 gradients add up until a step takes them; a failed pass adds nothing
S15 sums, never means; splits do not matter
S16 the losses, their defaults, unknown names and settings refused
S17 cross-entropy weights of any sign; none are ones; zero gives zero; tables of targets
S18 what custom losses need of cross-entropy
S19 lengths are checked and named; unknown inputs refused
S20 metrics are name:reduction, with loss:sum always
S21 outputs: log-probabilities for each position, in the data's order
S22 AdamW as torch has it, hyper-parameters from each request, clipping per adapter
S23 metrics of a step
S24 loading weights, with the optimizer when asked
S25 checkpoint names are unique by run and kind
S26 polls are held below the client's limit, then 408 with the queue's state
S27 results can be read again for a time; then gone; unknown ones are not found
S28 failures are results with a category, never 5xx
S29 batched polls and cancellation
S30 back-pressure on samples, never on training
S31 a sampler's weights never change
S32 nameless snapshots live as long as the session
S33 numbers of samples; one sent again is not drawn again
S34 stop rules
S35 log-probabilities are those of the distribution sampled from
S36 a seed decides, whatever else runs
S37 log-probabilities of prompts, top-k, targets
S38 what does not fit the window is refused first
S39 the grammar of paths
S40 archives: a redirect to a tar that needs no key
S41 the files of a checkpoint are PEFT's
S42 times to live, publishing, metadata
S43 written, flushed, renamed, then recorded
S44 what is there after a restart, and what is said of the rest
"""

SURPRISES = """
Q-1 hub files: the token is sent, writes are atomic, no way out of the directory
Q-2 a revision without a repository
Q-3 a branch is made for a revision
Q-4 archives and large files are streamed
Q-5 only its owner stops the reporter
Q-6 one flush timer
Q-7 an exception that is survived asks for a flush
Q-8 the same retries for both ways to send telemetry
Q-9 booleans and null stay what they are in events
Q-10 an incoming trace context is attached
Q-11 regularizers are callables or objects
Q-12 true gradients for KL and Consistency; async ones report zero with a warning
Q-13 a download's path is parsed before anything is removed
Q-14 a forced download swaps at the end, and leaves nothing behind
Q-15 the default output directory is the current one
Q-16 a missing key is told by every command
Q-17 an option given twice: the last wins
Q-18 progress goes to stderr
Q-19 lists end at an empty page
Q-20 sizes stop at TB
Q-21 text as path or content, bytes always content
Q-22 names in multipart bodies are escaped
Q-23 an example masks the key
Q-24 streams give chunks as they come, and keep the error's words
Q-25 events: one blank, none without data, split anywhere
Q-26 a half-open breaker reserves its place
Q-27 a regularizer that is no number is summed in both places
Q-28 an example that is to be skipped stops
Q-29 a stale cached checkpoint falls back to the list
"""

NOT_APPLICABLE = {
    "D33": "a slip in the older client's own notes; there is nothing that could behave wrongly",
    "24.session.4": "connection pools are made when used: a heartbeat cannot find its own missing",
    "1.1.4/9": "needs Kimi's own files, which the tests do not fetch; 1.1.4/11 is the same without "
    "a network",
    "24.training.5": "there is no supervisor process that could be absent: the loop thread starts "
    "when first needed",
}
"""What makes no sense here, and why."""


def _rows(*tables: str) -> dict[str, str]:
    pairs = [line.split(" ", 1) for table in tables for line in table.strip().splitlines()]
    rows = dict(pairs)
    assert len(rows) == len(pairs), "a number is listed twice"
    return rows


EXTRAS = """
1.1.1/1 a tokenizer's id from a model's name of any kind; never an error
1.1.1/2 a tokenizer by its id
1.1.1/3 text to tokens by a model's name, under two names
1.1.1/4 tokens to text by a model's name
1.1.1/5 Kimi's tokenizer is known by its exact id
1.1.1/6 options of encode and decode reach the loader or the resolver; unknown ones are refused
1.1.1/7 no chat template is applied, and special tokens are those the tokenizer adds itself
1.1.2/1 what a training client's server says comes first, up to its colon; failures are passed over
1.1.2/2 a name is cut at its first colon
1.1.2/3 Llama 3 of any kind has the tokenizer that needs no leave
1.1.2/4 of three parts the first two are kept
1.1.2/5 any other name is its own tokenizer's
1.1.2/6 Llama before the three parts, and never for what the server says
1.1.3/1 one cache for the process: the first tokenizer that was loaded stays
1.1.3/2 a loader of one's own: its result, its failures, and that those are not kept
1.1.3/3 the default loader: 120 s of silence, redirects followed
1.1.3/4 only Kimi's revision is pinned
1.1.4/1 Kimi's id
1.1.4/2 Kimi's pinned revision, and another one on request
1.1.4/3 Kimi's two files, fetched unless paths are given
1.1.4/4 the file of ranks: a token a line, bad lines passed over, an empty file an error
1.1.4/5 256 special tokens after the ranks, named by the configuration or reserved
1.1.4/6 text that spells a special token is that token, or plain text where that is asked for
1.1.4/7 of two special tokens the longer one can be preferred
1.1.4/8 special tokens are decoded to their text, broken UTF-8 to a sign, unknown ids are errors
1.1.4/9 the tokens of Kimi's own files
1.1.4/10 text is split by eight alternatives in order
1.1.4/11 the small example that needs no network
1.1.5/1 text that is none is refused
1.1.5/2 a model's name that is none is refused
1.1.5/3 tokens that are no list are refused
1.1.5/4 a token that is no whole number is refused
1.1.5/5 an id that is no text is refused
1.1.5/6 a failure while encoding or decoding says which, and why
1.1.6/1 model input from text needs a model's name
1.1.6/2 both of its forms raise ValueError
1.1.6/3 options go on to encode; there is one chunk of text
1.2.1/1 where a file of the hub is kept
1.2.1/2 a file that is here is not asked about; another is fetched from its address
1.2.1/3 404, other refusals with how they begin, and faults of the line are three errors
1.2.1/4 the small helpers have public names
1.2.2/1 the first token of five places that is not blank
1.2.2/2 where the file of the token is
1.2.2/3 an unreadable file is none; without a token the error says where it was looked for
1.2.3/1 the path is taken apart first
1.2.3/2 the hub is asked whose token it is; 401 is the user's error, others the hub's
1.2.3/3 the archive and the checkpoint's facts are asked for
1.2.3/4 all in a directory that is always removed
1.2.3/5 a configuration and weights are required, each lack named (half an archive when fetched)
1.2.3/6 an adapter that does not name its base model is made to
1.2.3/7 a repository and revision from what is given, or named after model and run
1.2.3/8 a model card with its front matter, use, source and details, where there is none
1.2.3/9 the repository is made, or is there; without an owner it is the token's
1.2.3/10 a repository that holds another checkpoint is left alone
1.2.3/11 files are chosen by patterns; none is an error
1.2.3/12 the hub says which files go the long way
1.2.3/13 large files go by themselves, those it has are not sent again
1.2.3/14 large files in parts where the hub wants that
1.2.3/15 one commit with its message
1.2.3/16 the upload can be a proposal
1.2.3/17 whatever the hub refuses is told with its status and beginning
1.2.3/18 all options with their defaults, and where the adapter lies as the result
1.2.3/19 the token is never logged
1.2.3/20 how long the hub may be silent can be chosen
1.3/1 tokenizer, encode and decode of a training client, by what its server says
1.3/2 tokenizer of a sampling client, by its sampler's base model
1.4.1/1 handlers are attached to names, told, detached
1.4.1/2 ids are unique; an unknown one is reported
1.4.1/3 handlers run in the thread that emits
1.4.1/4 a handler that fails is dropped and breaks nothing
1.4.2/1 http start: time; method, path, class of traffic, address, the user's own
1.4.2/2 http stop: duration; result and retries as well
1.4.2/3 http exception: duration; kind, reason and trace as well
1.4.2/4 queue state: request, state, reason
1.4.2/5 the five ends of waiting for a result, with their time and what is known of the request
1.4.2/6 the four steps of trying again, with their times
1.4.2/7 the events of recovery
1.4.2/8 the events of custom losses and regularizers
1.4.2/9 requests of training and sampling clients name their session, sampler and number
1.4.3/1 by default four events, one line each in a form of its own
1.4.3/2 exceptions at level error, other events in a general form, a level and an id of one's own
1.4.4/1 a session, a configuration and a way to send are required, by name
1.4.4/2 said here, else in the configuration, else in the environment, else on
1.4.4/3 off is no reporter; one of the same name is taken again
1.4.4/4 a service makes one, shows it, lends it to its children and stops it
1.4.5/1 telemetry is posted within five seconds, tried once more at most
1.4.5/2 in the background: at once, and failures are only logged
1.4.5/3 waited for: the answer or the error
1.5.1/1 session and sender are required
1.5.1/2 handler_id: made up by default
1.5.1/3 events: what went wrong by default; the console's four on request
1.5.1/4 attach_events: yes
1.5.1/5 flush_interval: ten seconds, 0 for no timer
1.5.1/6 flush_threshold: 100
1.5.1/7 flush_timeout: 30 s
1.5.1/8 http_timeout: 5 s
1.5.1/9 max_retries: 3
1.5.1/10 retry_base_delay: 1 s
1.5.1/11 max_queue_size: 10 000
1.5.1/12 max_batch_size: 100
1.5.1/13 enabled: by the configuration, then the environment; no reporter otherwise
1.5.1/14 name: none by default
1.5.2/1 log: true if taken, false if dropped
1.5.2/2 log_exception, which ends nothing
1.5.2/3 log_fatal_exception: the exception, the session's end once, a line in the log; nobody waits
1.5.2/4 flush, waited for or not
1.5.2/5 wait_until_drained, with a limit
1.5.2/6 stop: detached, the end told once, what waits sent
1.5.2/7 false from no reporter and from a dead one
1.5.3/1 the start is event 0, and every event made has the next number
1.5.3/2 a full queue drops with a warning
1.5.3/3 flushed at the threshold, and by a timer
1.5.3/4 batches in order, one after another; drained when all that was taken in went out
1.5.3/5 a batch given up is lost, and the rest goes on
1.5.3/6 events of the bus are reported for their own session alone
1.5.4/1 so many retries after the first attempt
1.5.4/2 waits double and grow by a tenth at most
1.5.4/3 each failure is logged with its number and wait, giving up with the number of retries
1.5.4/4 any kind of failure is tried again
1.5.5/1 what a batch says of session, platform and protocol
1.5.5/2 what all events carry
1.5.5/3 the session's start
1.5.5/4 the session's end with its duration
1.5.5/5 events of any name with their data
1.5.5/6 exceptions with type, message and trace
1.5.5/7 five severities in any case, others are INFO
1.5.5/8 data is made plain
1.5.6/1 an exception and what it came from are walked through, depth first, each once
1.5.6/2 a user's mistake is a warning with its facts
1.5.6/3 anything else is unhandled, with its own trace
1.5.6/4 our own errors speak for themselves
1.5.7/1 kinds and severities can be listed and parsed
1.5.7/2 four classes of events, to and from mappings, with their defaults
1.5.7/3 an event is made of a mapping by its kind; an unknown one is none
1.5.7/4 batches: to and from lists, size, metadata
1.5.7/5 requests take lists or batches, answers are always "accepted"
1.6/1 exceptions of a block or a function are reported and pass unchanged
1.6/2 the same under its other name
1.6/3 the same around a task or a thread
1.6/4 the end of a program is reported, being called off is not
1.6/5 what fails in the clients' calls is reported, once; it ends no session, which lives on
1.7/1 a provider has no reporter unless it says so
1.7/2 service, training and sampling clients are providers
1.8/1 off unless argument, program or environment say so
1.8/2 the current trace is put into the headers, last, changing nothing else and never failing
1.8/3 a trace is read from headers and attached, and left again
1.8/4 whether it is on and there, and the names of the headers
1.8/5 the package is optional
1.8/6 a span for every request, where asked for
1.9/1 the key and the address of the server
1.9/2 the switch of telemetry
1.9/3 the level of logging
1.9/4 the switch of trace headers
1.9/5 the places of Hugging Face
1.9/6 trimmed, blank is unset, yes and no in their usual words
1.9/7 settings can be shown without secrets
1.10/1 counters add
1.10/2 gauges replace
1.10/3 histograms collect numbers and nothing else
1.10/4 a snapshot of all three
1.10/5 reset forgets everything
1.10/6 flush waits for what has begun
1.10/7 options: on, twelve buckets, a thousand samples; off stops counting requests only
1.10/8 every request with a duration counts by its result
1.10/9 buckets, mean and extremes of all, percentiles of the newest
1.10/10 the numbers of the two examples
1.11/1 nothing happens unless it is started and switched on
1.11.1/1 enabled: no
1.11.1/2 max_attempts: 3
1.11.1/3 backoff_ms: 5 000
1.11.1/4 max_backoff_ms: 60 000
1.11.1/5 poll_interval_ms: 30 000
1.11.1/6 checkpoint_strategy: latest, best, a path; anything else is latest
1.11.1/7 restore_optimizer: yes
1.11.1/8 on_recovery: a callable of three arguments
1.11.1/9 on_failure: a callable of two
1.11.1/10 made of a policy, a mapping, pairs or nothing; unknown keys are passed over
1.11.1/11 a configuration takes the same, and refuses anything else
1.11.2/1 a policy of its own or the configuration's, an executor, a way to a REST client, a clock
1.11.2/2 a run is watched, or it is said why not; the same run replaces itself
1.11.2/3 a run is watched no longer, whether it was or not
1.11.2/4 the first look comes after one interval
1.11.2/5 what counts as corrupted
1.11.2/6 a healthy run stays; a look that fails is told and the run stays
1.11.2/7 a corrupted run is told, handed over and leaves; refused, it is offered again
1.11.2/8 no timer without runs
1.11.2/9 metadata that is no mapping is none; looks come one after another
1.11.3/1 at least one at a time
1.11.3/2 recover takes a run, or says that it is off or under way already
1.11.3/3 attempts, waits between them, and the end of them
1.11.3/4 a place is free as soon as an attempt ends; first come, first served
1.11.3/5 the client is made of the checkpoint, with the optimizer or without
1.11.3/6 which checkpoint it is; "best" by a metric that was saved with it
1.11.3/7 callbacks get the old client and the new, run off the loop, and may fail
1.11.4/1 detected, with the checkpoint
1.11.4/2 poll_error, with the error
1.11.4/3 started
1.11.4/4 checkpoint_selected, with the checkpoint
1.11.4/5 client_created, with client and checkpoint
1.11.4/6 completed, with client and checkpoint
1.11.4/7 failed, with the error
1.11.4/8 exhausted, with the error
1.11.4/9 all with the caller's metadata and the run, the executor's with attempt and strategy
1.12.1/1 the loss is the base and the weighted terms
1.12.2/1 callables of two or three arguments and objects are regularizers
1.12.2/2 execute tells the forms apart
1.12.2/3 specs of mappings or keywords are checked
1.12.2/4 asynchronous ones are waited for
1.12.3/1 outputs in the order of the specs; nothing gives nothing
1.12.3/2 one that raises is named
1.12.3/3 waiting that ends badly is an exit
1.12.3/4 one that takes too long is given up
1.12.3/5 one by one, the first failure ends it
1.12.3/6 side by side and one by one give the same
1.12.3/7 the order of the starts
1.12.4/1 the norm of any function's gradient, in any shape
1.12.4/2 a term's norm is not weighted; a failure is zero with a warning
1.12.4/3 the norm of the whole; a failure is zero with a warning
1.12.4/4 a base loss without a gradient has no norm; a constant has zero
1.12.4/5 the norms of the examples
1.12.5/1 started, checked, computed, told, in this order
1.12.5/2 what is checked, and that names are unique
1.12.5/3 the base loss and its metrics
1.12.5/4 norms where asked for; without terms the base's
1.12.5/5 exceptions become pipeline failures, a regularizer's failure stays; both are reported
1.12.6/1 what a term gives, and its JSON
1.12.6/2 what a loss gives, and its JSON
1.12.7/1 custom_loss.start
1.12.7/2 custom_loss.stop
1.12.7/3 custom_loss.exception
1.12.7/4 regularizer.compute.start
1.12.7/5 regularizer.compute.stop
1.12.7/6 regularizer.compute.exception
1.12.7/7 the six names, and a logger of one line each
1.12.8/1 L1
1.12.8/2 L2, centred before it is clipped
1.12.8/3 elastic net
1.12.8/4 entropy
1.12.8/5 Kullback-Leibler divergence
1.12.8/6 consistency
1.12.8/7 orthogonality
1.12.8/8 gradient penalty
1.12.8/9 fields of the first datum, as tensors or tensor data; lacks are errors
1.12.8/10 the axes of orthogonality
1.12.8/11 what there is not is refused
1.12.8/12 gradients in closed form
1.12.9/1 base
1.12.9/2 l1
1.12.9/3 entropy
1.12.9/4 entropy at half temperature
1.12.9/5 l2
1.12.9/6 elastic net
1.12.9/7 KL forward
1.12.9/8 KL reverse
1.12.9/9 KL symmetric
1.12.9/10 consistency
1.12.9/11 orthogonality
1.12.9/12 gradient penalty
1.12.9/13 the totals
1.12.9/14 perplexity, and the norm of a square's gradient
1.13/1 targets are required before anything is sent; both passes have their numbers in one block
1.13/2 the forward pass is cross-entropy's
1.13/3 log-probabilities: a tensor for each datum, from any form
1.13/4 the loss is summed where it is no number, and derived by each tensor
1.13/5 the second pass has minus the gradient for weights
1.13/6 the user's metrics are merged, and a step can follow
1.13/7 what does not fit is an error; nothing gives no gradient
1.14.1/1 the address of an archive and when it ends
1.14.1/2 an archive being packed is asked for six times, 30 s apart, or as said
1.14.1/3 other errors surface at once
1.14.2/1 a path is one, or nothing happens
1.14.2/2 the directory's name
1.14.2/3 what is there stays, without a request; or is replaced
1.14.2/4 what the server says of the checkpoint passes through
1.14.2/5 fetched in pieces, with progress; a bad status or line is an error
1.14.2/6 unpacked into the directory; a failure leaves nothing
1.14.2/7 no scratch files stay; the result says where it lies
1.14.3/1 absolute paths and ways up are refused before anything is unpacked
1.14.3/2 one safe unpacking for all: links, devices, sizes; plain and compressed
1.15/1 three parts; the kind says training or sampler, and the segment
1.15/2 scheme, shape and kind are three errors
1.15/3 a run may have colons
1.15/4 a lifetime is a positive whole number or none
1.15/5 the same rule in every call that takes one, and its body
1.17.1/1 a file is content, or a tuple of name, content, type and headers
1.17.1/2 when text is a path
1.17.1/3 missing files, directories and wrong kinds are errors of their own
1.17.2/1 bytes and literal text are sent themselves
1.17.2/2 a path is sent with its name
1.17.2/3 a name that is given wins
1.17.2/4 mappings by their names
1.17.2/5 lists keep their order
1.17.2/6 no files are none
1.17.2/7 anything else is refused; files are read off the loop
1.17.3/1 nested fields, lists, none, numbers and truth in a form
1.17.4/1 the bytes of a form, its boundary, order and defaults
1.17.5/1 a form for files or by its content type, whose boundary is used; else JSON
1.17.5/2 text cannot be a form; what is left out is left out before
1.18/1 levels set the package's own logger and no other
1.18/2 the package's version and the protocol's
1.19/1 any function can be retried: waits, cap, spread, what is not repeated, when it gives up
1.19/2 the log of held-up work: words, reasons, once a minute
1.19/3 observers: forms, crashes, changes only
1.19/4 the gate of samples: 400, 10 after back-pressure with bytes times 20, the server's bytes
1.19/5 one second of pause for a small prompt, five for a large one
1.19/6 bytes as estimated
1.19/7 at most 1 024 examples and 5 000 000 bytes a chunk
"""
"""What surrounds the core: telemetry, metrics, recovery, regularizers and so on; section of the
list/row or rule."""

BEYOND = """
4.1/1 samples as a stream: pieces as they are drawn, an end when the reader leaves, errors
4.1/2 events of a stream, fed in any pieces
4.1/3 traces out and in
4.1/4 a breaker for each endpoint, which can be switched on
4.1/5 one protocol over several training platforms, with a contract that all of them keep
4.1/6 the usual loop: service, run, passes, steps, saves
4.1/7 archives that are being packed are waited for
4.1/8 the hub's small helpers are public
4.1/9 trying again is our own
4.1/10 one set of metrics for the process, safe among threads
4.1/11 clients are made without blocking, too
4.1/12 a client that was closed says so
4.1/13 calls return futures, or wait where that is asked for
4.1/14 one error when a chunk fails
4.2/1 the routes are those of the newest client
4.2/2 a heartbeat that fails keeps its session, and is told after two minutes
4.2/3 the defaults of the optimizer and of adapters
"""
"""What was asked for beyond the older client, and where its own notes differ from it."""

COMMAND_LINE = """
1.16.1 the program: help, exit status, common options, what is unknown
1.16.2 the commands and their options
1.16.3 saving a checkpoint
1.16.4 sampling
1.16.5 lists, pages and what each command prints
1.16.6 deleting
1.16.7 sizes and times as people read them
"""

SDK_038 = """
U1 the client futures and `SamplingClientKind` are found where the official package has them
U2 creating a training client returns at once, with an object that poses as the client
U3 every way to wait for a client future gives the same client
U4 a timeout of `result` leaves the creation running; one of `result_async` cancels it
U5 the repr of a client future shows its state
U6 public attributes of a client future warn, wait and read the client; private ones raise
U7 every public method of a client works on its future and warns; a failed creation raises its error
U8 a sampling client future pickles as the client; a training client future does not pickle
U9 errors of arguments are raised in the call, errors of a path by the future
U10 tasks and gather take client, sample, training and REST futures
U11 a sample future is a concurrent future too; its concurrent methods warn once
U12 a done callback on a sample future fires although nobody waits
U13 `APIFuture.future` is abstract and `APIFuture.coroutine` a coroutine function
U14 REST and admin methods return an `APIFuture` without the concurrent methods
U15 every `_async` twin works, warns when called and is marked as deprecated
U16 `search_sessions_async` is gone; `RestClient.get_server_capabilities` makes no session
U17 `ServiceClient.get_server_capabilities` still works and warns
U18 what is learnt when a client is made is answered without a request
U19 the order of requests of a new and of a resumed training client
U20 the fields of `load_weights` when a run is resumed
U21 `samplers/{id}` is asked only for a sampler made of a path alone
U22 every sampler save carries its kind; a wrong one does not break the client
U23 every request names the public method that it serves
U24 the batched poller acknowledges without holding a request
U25 a rejected token is renewed once for all, and each request is sent once more
U26 a token is renewed at half of its life; an expired one is never sent
U27 a refused telemetry batch is dropped, and errors do not wait for it
U28 a training pause is logged after 15 minutes, a sampling pause at once
U29 a custom loss reserves its numbers and returns at once
U30 a custom loss runs on a thread of its own
U31 a custom loss that fails stops the later training requests of its client only
U32 a rejected chunk or a cancelled queued call holds nothing up
U33 handles carry the base model; those without it are read too
U34 blocking on the SDK's own loop raises an error
U35 the clients have no other public method that returns a future
U36 methods can be replaced on the client class, also for its futures
U37 a service client works as a plain context manager inside an event loop
U38 storage events show whether they are free; listing models makes no session
U39 version 0.39: base models of checkpoints, search of checkpoints, uploads of external weights
U40 the cookbook's own tests and loops have the same outcomes as with the official client
U41 unmodified 0.38.0 and 0.36.0 clients complete the loop
U42 the server answers `get_info` as soon as the model is there
U43 the server makes a run of a checkpoint, with its rank, flags and optimizer
U44 a batched poll with timeout 0 is answered at once; acknowledged results may be freed
U45 a rejected token is marked as such, a wrong key is not
U46 reserved numbers that never come hold nobody else up
U47 inflight samplers of a run follow its newest inflight save
U48 an inflight save neither ends nor restarts a running sample
U49 prefixes are shared within an inflight session only
U50 a snapshot's samples do not change with inflight saves
U51 an inflight save with a path, and another kind, are the caller's errors
U52 sampling records last a day, and are renewed by use; other ids are the caller's errors
U53 the spans that `stable_reinforce` takes and refuses
U54 `stable_reinforce`: its setting, its output, its gradient on policy
U55 earlier nameless samplers of a run stay usable
U56 a sample says how many prompt tokens came from the cache
U57 an OpenAI-compatible model may be a base model with a sampler path
"""
"""What changed with version 0.38 of the official client, for client and server."""

FLEET = """\
K1 one engine in the server's process behaves as before, and Ray is not imported
K2 both clients' loops over other processes: the same bits as in one process
K3 two runs at home on two workers train at the same time
K4 a checkpoint of one worker samples the same on another
K5 kills of workers, machines and heads: nothing acknowledged is lost or doubled
K6 runs of a worker that is lost for good move; without a worker requests wait, and say why
K7 a process of an older epoch changes nothing
K8 a slow or dead worker delays no other
K9 the cost of the link
K10 the head's memory is flat; files travel in pieces
K11 each mistake in the set-up has a message that names it
K12 a cluster that others can reach needs a token
K13 metrics, status, readiness and logs name the worker
"""
"""The statements about workers in other processes."""

REQUIREMENTS = _rows(
    CAPABILITIES,
    DEFECTS,
    CHECKLIST,
    WEAKNESSES,
    SERVER_RULES,
    SURPRISES,
    EXTRAS,
    BEYOND,
    COMMAND_LINE,
    SDK_038,
    FLEET,
)


def group_of(number: str) -> str:
    """The group a number belongs to: C, D, 24, W, S, Q, 1 and 4 for the extras, U, K, 1.16 for the
    command line.
    """
    if number.startswith("1.16."):
        return "1.16"
    return number.partition(".")[0] if number[0].isdigit() else number[0]
