"""Tools that do not exist: schemas of every shape, requests that call for them, their results.

Three sources. *Known* tools are ordinary ones (weather, mail, files) under many names for the same
thing, so that the schema has to be read. *Composed* tools have random words and parameters, and the
request names the parameters. *Implied* tools are random too, but their request is a plain sentence:
which tool it means shows only in the words that it shares with a schema, and which parameter a value
belongs to only in what kind of value it is. A `Made` tool says how to ask for it and what the right
call is.
"""

# ruff: noqa: E501 - a table with a tool a line

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.words import Words

Json = dict[str, Any]
# names, descriptions, (aliases, kind, optional) of each parameter, requests, result keys
Row = tuple[list[str], list[str], list[tuple[list[str], str, bool]], list[str], list[str]]


@dataclass
class Made:
    """One tool in a prompt, with one request for it."""

    function: Json
    request: str
    arguments: Json
    results: list[str] = field(default_factory=list)  # keys of a result that fits
    words: tuple[str, ...] = ()  # those that tell its request from another tool's

    @property
    def name(self) -> str:
        return str(self.function["name"])


# names | descriptions | parameters "alias/alias kind" (? = optional) | requests | result keys.
# A request names parameter i as {i}; `&i=json` at its end sets one that the words imply.
_KNOWN = """
get_weather/weather/current_weather/weather_lookup/fetch_weather/weather_now/check_weather | Get weather/Get the current weather for a city/Current weather/Weather at a place | city/location/place/town place; ?unit/units/scale celsius,fahrenheit | What is the weather in {0}?/What's the weather like in {0}?/How is the weather in {0}?/Weather in {0}?/Tell me the weather in {0} in {1}./How warm is it in {0}?/Is it raining in {0}?/Check the weather in {0}, please./Do I need an umbrella in {0}?/How cold is it in {0}?/I am going to {0}, what is the weather there?/Give me the weather for {0} in {1}./Is it sunny in {0}?/Weather for {0}, please. | temp,sky,wind
get_forecast/forecast/weather_forecast | Get the weather forecast for some days/Forecast for a place | city/location place; days/n_days int | Forecast for {0} for {1} days./What will the weather be in {0} for the next {1} days?/Give me the {1} day forecast for {0}./How will the weather be in {0} over {1} days?/I need a forecast for {0}, {1} days./Will it rain in {0} within {1} days? | high,low,sky
get_time/current_time/time_in/clock/world_clock | Get the current time in a city/Current local time/Tell the time | city/place/location place | What time is it in {0}?/Tell me the time in {0}./Current time in {0}?/What is the local time in {0}?/How late is it in {0}?/I need the time in {0}./What does the clock say in {0}? | time,zone
send_email/send_mail/mail/email_send | Send an email/Send a mail to somebody | to/recipient/address email; subject/title phrase; ?body/text/message phrase | Send an email to {0} with subject {1}./Email {0}, subject {1}, saying {2}./Write a mail to {0} about {1}./Send {0} a mail with the subject {1} and the text {2}./I have to email {0} about {1}./Let {0} know by mail: subject {1}, text {2}./Mail {0} with the subject {1}. | status,id
send_message/message/text_user/send_text | Send a message to a person/Text somebody | to/person/name/recipient name; text/message/body phrase | Tell {0}: {1}./Send {0} the message {1}./Text {0} that {1}./Message {0}: {1}./Send a message to {0} that says {1}./I want to tell {0} {1}./Drop {0} a line: {1}. | status,id
read_file/open_file/cat_file/load_file/file_read | Read a file/Read the contents of a file/Show a file | path/file/filename path | Read {0}./Open {0}./Show me the file {0}./What is in {0}?/What does {0} contain?/Please read the file {0}./I want to see {0}./Print the contents of {0}./Give me the text of {0}./Load {0}. | text
write_file/save_file/create_file/file_write | Write text to a file/Save a file | path/file/filename path; content/text/data phrase | Write {1} to {0}./Save {1} in {0}./Create the file {0} with the text {1}./Put {1} into the file {0}./Make a file {0} that contains {1}./Write a file named {0}: {1}./I want {1} saved as {0}. | status,bytes
delete_file/remove_file/rm | Delete a file/Remove a file | path/file path; ?force/recursive bool | Delete {0}./Remove the file {0}./Get rid of {0}./Delete {0} by force.&1=true/Erase {0}./I do not need {0} any more, delete it./The file {0} can go, remove it. | status
list_files/ls/list_folder/list_directory/dir | List the files of a folder/List a directory | path/folder/directory path; ?hidden/all/show_hidden bool | List the files in {0}./What files are in {0}?/Show the folder {0}./List {0}, also hidden files.&1=true/Which files does {0} have?/What is inside the folder {0}?/Give me the contents of the directory {0}. | files,count
run_command/shell/bash/execute/exec | Run a shell command/Execute a command | command/cmd phrase; ?timeout/seconds int | Run {0}./Execute {0}./Run the command {0} with a timeout of {1} seconds./Run {0} in the shell./Use the shell to run {0}./I need {0} executed./Start the command {0}. | output,code
grep/search_files/find_text/search_code | Search files for a text/Find a pattern in files | pattern/text/query word; ?path/folder/dir path | Search for {0} in {1}./Find {0} in {1}./Where is {0} used?/Grep {0} in {1}./Which files in {1} contain {0}?/Look for {0} in {1}./Does {1} mention {0}? | matches,count
search/web_search/search_web/google/find_online | Search the web/Look something up on the web | query/q/text/terms phrase; ?limit/count/max_results int | Search for {0}./Search the web for {0}./Look up {0}./Find {1} results about {0}./Google {0}./I need information about {0}./What does the web say about {0}?/Do a web search for {0}. | title,url
fetch_url/open_page/get_page/browse/http_get | Fetch a web page/Get a page by its address | url/address/link url | Open {0}./Fetch {0}./Get the page {0}./What is on {0}?/Show me {0}./Download {0}./Visit {0}./Load the page {0}. | title,text
calculator/calculate/calc/compute/eval_expression | Calculate an expression/Do arithmetic | expression/formula/expr sum | What is {0}?/Calculate {0}./Compute {0}./How much is {0}?/Work out {0}./I need the result of {0}./Solve {0}. | result
add_numbers/add/sum/plus | Add two numbers/Sum of two numbers | a/x/first int; b/y/second int | Add {0} and {1}./What is {0} plus {1}?/Sum {0} and {1}. | sum
multiply/times/product | Multiply two numbers | a/x/first int; b/y/second int | Multiply {0} by {1}./What is {0} times {1}? | product
translate/translate_text/translation | Translate text/Translate text into a language | text/phrase/input phrase; target/language/to/target_language language | Translate {0} into {1}./How do you say {0} in {1}?/Translate {0} to {1}, please./Say {0} in {1}./What is {0} in {1}?/I need {0} in {1}./Give me the {1} for {0}. | translation
convert_currency/exchange/currency | Convert money between currencies | amount/value int; from/source EUR,USD,GBP,JPY,CHF; to/target EUR,USD,GBP,JPY,CHF | Convert {0} {1} to {2}./How much is {0} {1} in {2}?/Exchange {0} {1} for {2}./I have {0} {1}, how much {2} is that?/Change {0} {1} into {2}. | amount,rate
convert_units/unit_convert | Convert between units | value/amount decimal; from_unit/from km,mile,meter,foot,kg,pound; to_unit/to km,mile,meter,foot,kg,pound | Convert {0} {1} to {2}./How many {2} are {0} {1}?/What is {0} {1} in {2}?/Give me {0} {1} as {2}. | value
set_alarm/alarm/add_alarm/wake_me | Set an alarm | time/at clock; ?label/name/title word | Wake me at {0}./Set an alarm for {0}./Set an alarm at {0} called {1}./I have to get up at {0}./Alarm at {0}, please./Please let an alarm ring at {0}. | status,id
set_timer/timer/start_timer/countdown | Start a timer/Set a timer in minutes | minutes/duration/mins int; ?label/name food | Set a timer for {0} minutes./Timer, {0} minutes./Start a {0} minute timer for the {1}./Count down {0} minutes./Let me know in {0} minutes./I need a timer, {0} minutes. | status,id
create_reminder/remind/add_reminder/reminder | Create a reminder | text/what/task phrase; time/at/when clock; ?day/on day | Remind me to {0} at {1}./Remind me at {1} to {0}./Remind me to {0} on {2} at {1}./At {1} I have to {0}, remind me./I must not forget to {0} at {1}. | status,id
create_event/add_event/calendar_add/schedule_meeting | Create a calendar event/Add a meeting to the calendar | title/name/subject phrase; date/day date; ?time/start clock; ?attendees/people/guests names | Create the event {0} on {1}./Schedule {0} on {1} at {2}./Put {0} in the calendar for {1} with {3}./Plan a meeting {0} on {1} with {3}./There is a meeting {0} on {1}, add it./Add {0} to my calendar on {1}./New event on {1}: {0}. | status,id
list_events/get_calendar/agenda/calendar | List calendar events of a day/Show the calendar | date/day/on date | What is on my calendar on {0}?/Show my events for {0}./What do I have on {0}? | title,time
play_music/play/play_song/music | Play a song/Play music | song/title/track phrase; ?artist/by/singer name | Play {0}./Play {0} by {1}./I want to hear {0} by {1}./Put on {0}./I want to listen to {0}./Start the song {0} by {1}./Music: {0} by {1}. | status
set_volume/volume | Set the volume/Set the volume in percent | level/volume/percent int; ?room/where/place word | Set the volume to {0}./Volume {0}./Set the volume to {0} in the {1}./Make it {0} percent loud./I want the volume at {0}./Sound to {0} percent, please. | status
set_light/light/lights/switch_light | Switch a light | room/where/place word; state/mode on,off; ?brightness/percent int | Turn {1} the light in the {0}./Switch {1} the {0} light./Switch {1} the light in the {0}, brightness {2}./Lights {1} in the {0}./I want the light {1} in the {0}. | status
set_temperature/thermostat/heating | Set the heating of a room | room/zone word; temperature/degrees/value int | Set the {0} to {1} degrees./Heat the {0} to {1} degrees./I want {1} degrees in the {0}./Make the {0} {1} degrees warm. | status
book_flight/flight_booking/reserve_flight/buy_flight | Book a flight | origin/from/start place; destination/to/target place; date/day date; ?seats/passengers int | Book a flight from {0} to {1} on {2}./I need to fly from {0} to {1} on {2}./Book {3} seats from {0} to {1} on {2}./I want to fly to {1} from {0} on {2}./Get me a ticket from {0} to {1} for {2}. | status,code
search_flights/find_flights/flights | Find flights between cities | origin/from place; destination/to place; ?date/day date | Find flights from {0} to {1}./Which flights go from {0} to {1} on {2}?/Show flights from {0} to {1}. | flight,price
book_hotel/reserve_hotel/hotel | Book a hotel room | city/place/location place; nights/n_nights int; ?guests/people int | Book a hotel in {0} for {1} nights./I need a room in {0} for {1} nights./Book a room in {0} for {1} nights and {2} people./I stay in {0} for {1} nights, book a hotel./Find me a hotel in {0}, {1} nights. | status,code
book_table/reserve_table/restaurant | Reserve a table | restaurant/name/place word; people/guests/size int; ?time/at clock | Book a table at {0} for {1}./Reserve a table for {1} people at {0} at {2}./Table for {1} at {0}, please./We are {1} and want to eat at {0}./I want a table at {0} for {1} people. | status,code
get_directions/route/navigate/directions | Find the way between places | start/from/origin place; end/to/destination place; ?mode/by/transport car,bus,train,bike | How do I get from {0} to {1}?/Route from {0} to {1} by {2}./Take me from {0} to {1} by {2}./Directions from {0} to {1}./What is the way from {0} to {1}?/I want to go from {0} to {1} by {2}./Show me the route between {0} and {1}. | distance,minutes
get_distance/distance | Distance between two cities | from/a/origin place; to/b/destination place | How far is it from {0} to {1}?/Distance from {0} to {1}?/How many kilometres from {0} to {1}?/Is it far from {0} to {1}?/Give me the distance between {0} and {1}. | km
get_stock_price/stock/quote/stock_price | Get the price of a stock | symbol/ticker/company code | What is the price of {0}?/Price of {0} stock?/How is {0} stock doing? | price,change
get_news/news/headlines | Get news/Latest headlines about a topic | topic/about/subject word; ?limit/count int | News about {0}./Give me {1} headlines about {0}./What is new about {0}?/What happened with {0}?/I want to read about {0}./Any news on {0}? | title
find_recipe/recipe/search_recipes | Find a recipe | ingredients/items foods; ?vegetarian/veggie bool | Find a recipe with {0}./What can I cook with {0}?/A vegetarian recipe with {0}.&1=true/I have {0}, what can I make?/What meal can be made of {0}?/Recipe with {0}, please. | recipe,minutes
add_to_cart/cart_add/put_in_cart | Put a product into the cart | product/item/article thing; quantity/count/amount int | Add {1} {0} to my cart./Put {1} {0} in the cart. | status,total
order_food/order/order_meal | Order food | dish/food/item food; quantity/count/number int; ?address/to place | Order {1} {0}./I want {1} {0} delivered to {2}./Order {1} {0} to {2}./I am hungry, order {1} {0}./Get me {1} {0}. | status,minutes
track_order/order_status/track_package/where_is_order | Track an order/Get the state of an order | order_id/id/number/code code | Where is my order {0}?/Track {0}./What is the status of order {0}?/Has {0} been sent?/When does my order {0} come?/I am waiting for order {0}./Find out where {0} is. | status,date
cancel_order/order_cancel | Cancel an order | order_id/id/number code; ?reason/why phrase | Cancel order {0}./Cancel {0} because {1}./Please cancel my order {0}./I do not want order {0} any more./Stop order {0}, {1}. | status
create_user/add_user/register_user/new_user | Create a user account | name/username/user name; email/mail email; ?admin/is_admin bool | Create a user {0} with email {1}./Add {0}, {1}, as a user./Register {0} with the mail {1} as admin.&2=true/New user: {0}, {1}./Make an account for {0} with {1}. | status,id
get_user/find_user/user_info/lookup_user | Look up a user | id/user_id/name name | Who is {0}?/Look up the user {0}./Get the data of {0}./Find {0} in the user list. | name,email
create_ticket/open_ticket/new_issue/report_bug | Open a support ticket/Report a bug | title/summary/subject phrase; priority/level low,medium,high,urgent | Open a {1} priority ticket: {0}./Create a ticket {0} with priority {1}./Report {0}, priority {1}./There is a problem: {0}, priority {1}./File a ticket about {0}, it is {1}. | status,id
close_ticket/resolve_issue | Close a ticket | id/ticket_id/number code | Close ticket {0}./Ticket {0} is solved, close it./Resolve {0}. | status
add_note/note/take_note/save_note | Save a note | text/content/note phrase; ?tag/label/topic word | Note: {0}./Take a note: {0}./Save the note {0} with the tag {1}./Write down {0}./I want to remember {0}./Keep this in mind: {0}./Note down {0} under {1}. | status,id
add_task/todo/add_todo/create_task | Add a task to the list | title/task/text phrase; ?due/date/deadline date | Add {0} to my tasks./New task: {0}, due {1}./Put {0} on my list./I still have to {0}./Task for {1}: {0}./Remember to do this: {0}. | status,id
define/dictionary/lookup_word/define_word | Look up the meaning of a word | word/term word | Define {0}./What does {0} mean?/Look up the word {0}./Explain the word {0}./What is the meaning of {0}?/I do not know the word {0}. | meaning
get_population/population | Population of a city | city/place place; ?year int | How many people live in {0}?/Population of {0}?/How big is {0}?/How many inhabitants does {0} have?/Number of people in {0}? | population
random_number/roll/dice/random | Draw a random number | low/min int; high/max int | Pick a number between {0} and {1}./Random number from {0} to {1}./Give me a random number from {0} to {1}./Roll between {0} and {1}. | number
run_query/sql/query_database/db_query | Run a query on the database | table/collection word; ?limit/rows int | Show {1} rows of {0}./Query the table {0}./Get the first {1} rows of table {0}. | rows
git_commit/commit | Commit changes with a message | message/text phrase; ?push bool | Commit with the message {0}./Commit {0} and push.&1=true | hash
run_tests/test/pytest | Run the tests of a folder | path/folder/target path; ?verbose/detailed bool | Run the tests in {0}./Test {0}./Run the tests in {0} with details.&1=true/Do the tests in {0} pass?/Check {0} with the tests. | passed,failed
resize_image/resize/scale_image | Resize a picture | path/image/file path; width/w int; height/h int | Resize {0} to {1} by {2}./Make {0} {1} wide and {2} high./I need {0} at {1} by {2} pixels./Change {0} to {1} x {2}. | status
post_tweet/post/publish_post | Publish a short post | text/message/content phrase | Post {0}./Publish {0}./Tweet {0}. | status,id
call_phone/phone/call | Call somebody | name/person/contact name | Call {0}./Phone {0}, please./I want to talk to {0} on the phone./Get {0} on the phone./Ring {0}./I have to speak to {0}. | status
pay/transfer_money/send_money | Send money to a person | to/recipient/name name; amount/sum int; ?note/reason phrase | Pay {0} {1} euros./Send {1} euros to {0}./Transfer {1} to {0} for {2}./I owe {0} {1} euros, pay it./{0} gets {1} euros from me. | status,id
get_balance/balance/account_balance | Balance of an account | account/id/number code | What is the balance of {0}?/How much money is in account {0}?/How much do I have on {0}?/Show me the balance of account {0}. | balance
""".strip()
# Evaluation only: training never sees these tools or their phrasings.
_UNSEEN = """
rent_car/car_rental | Rent a car in a city | city/pickup place; days/duration int; ?size/category small,medium,large | Rent a car in {0} for {1} days./I need a {2} car in {0} for {1} days. | status,code
get_sunrise/sunrise_time | When the sun rises in a city | city/location place; ?date date | When does the sun rise in {0}?/Sunrise in {0} on {1}? | time
water_plants/irrigate | Water the plants of a zone | zone/bed word; minutes/duration int | Water the {0} for {1} minutes./Give the {0} water for {1} minutes. | status
lock_door/door_lock | Lock or unlock a door | door/name word; action/state lock,unlock | Please {1} the {0} door./{1} the {0} door now. | status
find_book/book_search | Find a book in the library | title/name phrase; ?author/writer name | Find the book {0} by {1}./Do we have the book {0}? | shelf,status
ship_parcel/send_parcel | Send a parcel | to/receiver name; city/destination place; weight/kilos int; ?express/fast bool | Ship a parcel of {2} kilos to {0} in {1}./Send {0} in {1} a parcel of {2} kilos, express.&3=true | code
measure_pressure/read_pressure | Read the pressure of a pump | pump/device code | What is the pressure at pump {0}?/Read the pressure of {0}. | pressure
invite_guests/send_invites | Invite people to an event | event/title phrase; guests/people names | Invite {1} to {0}./Send invitations for {0} to {1}. | status
charge_car/start_charging | Charge the car up to a level | level/percent int; ?start/at clock | Charge the car to {0} percent./Charge the car to {0} percent, starting at {1}. | status
rotate_image/turn_picture | Rotate a picture | path/file path; angle/degrees int | Rotate {0} by {1} degrees./Turn the picture {0} by {1} degrees. | status
""".strip()


def _parse(table: str) -> list[Row]:
    rows = []
    for line in table.splitlines():
        names, descriptions, params, requests, results = (
            part.strip() for part in line.split(" | ")
        )
        fields = []
        for p in params.split("; "):
            aliases, kind = p.lstrip("?").rsplit(" ", 1)
            fields.append((aliases.split("/"), kind, p.startswith("?")))
        asks = re.split(r"(?<=[.?])/|(?<=true)/", requests)
        rows.append((names.split("/"), descriptions.split("/"), fields, asks, results.split(",")))
    return rows


KNOWN, UNSEEN = _parse(_KNOWN), _parse(_UNSEEN)
# First words of requests that a "please" or "can you" can stand before.
_IMPERATIVE = frozenset(
    """Send Email Write Tell Text Message Read Open Show Save Create Put Delete
    Remove Get List Run Execute Search Find Look Fetch Calculate Compute Add Sum Multiply Translate
    Say Convert Exchange Wake Set Start Remind Schedule Plan Play Turn Switch Heat Book Reserve Take
    Give Order Track Cancel Register Report Close Resolve Define Pick Query Commit Test Resize Make
    Post Publish Call Phone Pay Transfer Check Rent Water Ship Invite Charge Rotate""".split()
)
_TYPE = {"int": "integer", "decimal": "number", "bool": "boolean"}


def _join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _value(w: Words, kind: str) -> tuple[Any, str]:
    """A value and how a person writes it."""
    r = w.rng
    if "," in kind:
        v = r.choice(kind.split(","))
        return v, v
    if kind == "int":
        n = w.number()
        return n, str(n)
    if kind == "decimal":
        x = w.decimal()
        return x, str(x)
    if kind == "sum":
        a, b = w.integer(), w.integer()
        s = f"{a} {r.choice('+-*/')} {b}"
        return s, s
    if kind == "names":
        names = w.several("person", r.randint(1, 3))
        return names, _join(names)
    if kind == "foods":
        foods = w.several("food", r.randint(1, 3))
        return foods, _join(foods)
    s = {
        "place": w.place, "name": w.name, "date": w.date, "clock": w.clock, "code": w.code,
        "email": w.email, "path": w.path, "url": w.url, "phrase": lambda: w.phrase(1, 5),
        "word": w.any_word, "language": lambda: w.draw("language"), "day": lambda: w.draw("day"),
        "food": lambda: w.draw("food"), "thing": lambda: w.draw("thing"),
    }[kind]()  # fmt: skip
    return s, (f"'{s}'" if kind == "phrase" and r.random() < 0.4 else s)


def schema(kind: str, describe: str = "") -> Json:
    """The JSON schema of one parameter."""
    if "," in kind:
        out: Json = {"type": "string", "enum": kind.split(",")}
    elif kind in ("names", "foods", "list"):
        out = {"type": "array", "items": {"type": "string"}}
    else:
        out = {"type": _TYPE.get(kind, "string")}
    if describe:
        out["description"] = describe
    return out


def function(w: Words, name: str, description: str, params: list[tuple[str, Json, bool]]) -> Json:
    """The function object, in one of the shapes that clients write."""
    r = w.rng
    parameters: Json = {"type": "object", "properties": {n: s for n, s, _ in params}}
    required = [n for n, _, optional in params if not optional]
    if required or r.random() < 0.3:
        parameters["required"] = required
    if r.random() < 0.08:
        parameters["additionalProperties"] = False
    out: Json = {"name": name}
    if r.random() < 0.95:
        out["description"] = description
    out["parameters"] = parameters
    return out


def _described(w: Words, kind: str) -> str:
    """A description as clients write them for a kind of value; the example in it is not meant."""
    r = w.rng
    if "," in kind:
        return "One of " + ", ".join(kind.split(","))
    return {
        "place": r.choice([f"The city and country, e.g. {w.place()}", f"City name, for example {w.place()}",
                           "The city and state, e.g. San Francisco, CA"]),
        "int": r.choice(["A whole number", f"How many, e.g. {w.integer()}", "Number, at least 1"]),
        "date": r.choice(["The date", "Date as the user says it"]), "clock": r.choice(["Time of day", "The time"]),
        "email": f"Email address, e.g. {w.email()}", "path": r.choice(["Path of the file", f"Absolute path, e.g. {w.path()}"]),
        "url": "The full address", "name": "Full name of the person", "code": f"For example {w.code()}",
        "bool": "Whether to do so", "phrase": "Any text", "sum": "For example 2 + 2",
        "names": "List of names", "foods": "List of ingredients",
    }.get(kind, "")  # fmt: skip


def known(w: Words) -> Made:
    """An ordinary tool under one of its many names."""
    r = w.rng
    names, descriptions, fields, requests, results = r.choice(UNSEEN if w.unseen else KNOWN)
    name = r.choice(names)
    if r.random() < 0.1:
        name = f"{w.any_word()}_{name}"
    description = r.choice(descriptions) + r.choice(["", "."])
    chosen, params = [], []
    for aliases, kind, optional in fields:
        alias = r.choice([a for a in aliases if a not in chosen] or [w.pseudo()])
        chosen.append(alias)
        say = r.choice(
            [
                "",
                f"The {alias}",
                f"{alias.capitalize()} of the {w.draw('noun')}",
                _described(w, kind),
            ]
        )
        params.append((alias, schema(kind, say.replace("_", " ")), optional))
    text, _, implied = r.choice(requests).partition("&")
    arguments: Json = {}
    spoken: dict[int, str] = {}
    for i, (_, kind, _) in enumerate(fields):
        if f"{{{i}}}" in text:
            arguments[chosen[i]], spoken[i] = _value(w, kind)
    if implied:
        i, value = implied.split("=")
        arguments[chosen[int(i)]] = json.loads(value)
    for i, s in spoken.items():
        text = text.replace(f"{{{i}}}", s)
    text = text[0].upper() + text[1:]
    # A tool without its optional parameters is a tool too.
    kept = [p for p in params if not p[2] or p[0] in arguments or r.random() < 0.7]
    ordered = {n: arguments[n] for n, _, _ in kept if n in arguments}
    made = function(w, name, description, kept)
    return Made(made, _manner(w, text), ordered, results, (name,))


_BEFORE = ["Please ", "Can you ", "Could you ", "I want you to ", "Hey, ", "Now ", "Will you ",
           "I need you to ", "Let us ", "We have to ", "I would like to ", "Quickly "]  # fmt: skip
_BEFORE_UNSEEN = ["Would you kindly ", "It is time to ", "Next, "]
_FIRST = ["Hello! ", "Hi. ", "OK. ", "Good morning. ", "Next. ", "One more thing. ", "Well, ", "So: ",
          "Hey, ", "And now: ", "Listen. ", "I have a task. "]  # fmt: skip
_LAST = [" Thanks.", " Thank you!", " Please.", " It is urgent.", " Do it now.", " Be quick.",
         " That is all."]  # fmt: skip


def _manner(w: Words, text: str) -> str:
    """The same request a little differently."""
    r = w.rng
    x = r.random()
    if x < 0.08:
        return text.lower() if not any(c.isupper() for c in text[1:]) else text
    if x < 0.14 and text.endswith("."):
        return text[:-1]
    if x < 0.22:
        return text + r.choice(_LAST)
    if x < 0.32:
        return r.choice(_FIRST) + text
    if x < 0.42 and text.endswith(".") and text.split(" ")[0] in _IMPERATIVE:
        lead = r.choice(_BEFORE_UNSEEN if w.unseen else _BEFORE)
        asks = lead.startswith(("Can", "Could", "Will", "Would"))
        return lead + text[0].lower() + (text[1:-1] + "?" if asks else text[1:])
    return text


def _spoken(w: Words, name: str, kind: str) -> tuple[Any, str]:
    """A value of a made-up parameter and the words `name value` in a request."""
    r = w.rng
    plain = name.replace("_", " ")
    if kind == "bool":
        if r.random() < 0.5:
            return True, r.choice([f"with {plain}", f"{plain} on", f"{plain} true", f"{plain} yes"])
        return False, r.choice(
            [f"without {plain}", f"{plain} off", f"{plain} false", f"{plain} no"]
        )
    if kind == "list":
        items = [w.any_word() for _ in range(r.randint(1, 4))]
        return items, f"{plain} {_join(items)}"
    if kind in ("int", "decimal") or "," in kind:
        v, s = _value(w, kind)
    else:
        v = w.string(name)
        s = f"'{v}'" if " " in v and r.random() < 0.4 else v
    form = r.choice(["{n} {v}", "{n} {v}", "{n}: {v}", "{n} = {v}", "{v} as {n}", "the {n} is {v}"])
    return v, form.format(n=plain, v=s)


def _choices(w: Words) -> str:
    """Two to five different enum values."""
    n, out = w.rng.randint(2, 5), dict[str, None]()
    while len(out) < n:
        out[w.draw("choice") if w.rng.random() < 0.7 else w.any_word()] = None
    return ",".join(out)


def _names(w: Words, verb: str, noun: str) -> tuple[str, str]:
    """Verb and noun of a made-up tool, where they are not given."""
    r = w.rng
    verb = verb or (w.draw("verb") if r.random() < 0.85 else w.any_word())
    noun = noun or (w.draw("noun") if r.random() < 0.6 else w.any_word())
    return verb, noun


def composed(w: Words, verb: str = "", noun: str = "") -> Made:
    """A tool that nobody has: random verb, noun and parameters, all of them said."""
    r = w.rng
    verb, noun = _names(w, verb, noun)
    extra = f" {w.any_word()}" if r.random() < 0.25 else ""
    form = r.choice(["{}_{}", "{}_{}", "{}_{}", "{}-{}", "{}.{}", "{}"])
    name = form.format(verb, noun) if form != "{}" else verb + noun.capitalize()
    name += extra.replace(" ", "_")
    kinds: list[str] = []
    for _ in range(r.choice([0, 1, 1, 1, 2, 2, 2, 3, 3, 4])):
        x = r.random()
        kinds.append(
            "string" if x < 0.5
            else "int" if x < 0.66
            else "decimal" if x < 0.7
            else "bool" if x < 0.8
            else _choices(w) if x < 0.93
            else "list"
        )  # fmt: skip
    params: list[tuple[str, Json, bool]] = []
    arguments: Json = {}
    phrases: list[str] = []
    for kind in kinds:
        field_name = (
            w.draw("flag")
            if kind == "bool"
            else w.draw("field")
            if r.random() < 0.65
            else w.any_word()
        )
        if r.random() < 0.15 and kind != "bool":
            field_name = f"{w.any_word()}_{field_name}"
        if field_name in [p[0] for p in params]:
            field_name = w.pseudo()
        optional = r.random() < 0.3
        plain = field_name.replace("_", " ")
        say = r.choice(
            [
                "",
                "",
                f"The {plain}",
                f"{plain.capitalize()} of the {noun}",
                f"Which {plain}",
                f"The {plain} of the {noun} to {verb}",
            ]
        )
        params.append((field_name, schema("list" if kind == "list" else kind, say), optional))
        if optional and r.random() < 0.5:
            continue
        arguments[field_name], phrase = _spoken(w, field_name, kind)
        phrases.append(phrase)
    order = list(phrases)
    r.shuffle(order)
    listed = order[0] if len(order) == 1 else "" if not order else r.choice([
        _join(order), ", ".join(order), _join(order), "; ".join(order)])  # fmt: skip
    article = r.choice(["the ", "a ", "", "my ", "this "])
    ask = f"{verb} {article}{noun}{extra}"
    lead = (
        r.choice(_BEFORE_UNSEEN)
        if w.unseen and r.random() < 0.3
        else r.choice(["", "", "", *_BEFORE])
    )
    if r.random() < 0.12:
        ask = f"use {name}" if r.random() < 0.5 else f"call {name}"
    text = lead + ask
    if listed:
        text += r.choice([" with ", ", ", ": ", " for ", ". Use "]) + listed
    text = text[0].upper() + text[1:]
    text += "?" if lead.startswith(("Can", "Could", "Would")) else r.choice([".", ".", ""])
    description = r.choice([
        f"{verb.capitalize()} {article or 'a '}{noun}{extra}", f"{verb.capitalize()} {noun}{extra}.",
        f"Tool to {verb} {noun}{extra}.", f"{verb.capitalize()} something: {noun}{extra}",
    ])  # fmt: skip
    keys = [w.any_word() if r.random() < 0.5 else w.draw("field") for _ in range(r.randint(1, 3))]
    return Made(
        function(w, name, description, params), text, arguments, list(dict.fromkeys(keys)),
        (verb, noun),
    )  # fmt: skip


@dataclass(frozen=True)
class _Slot:
    """A kind of value that shows what it is: names of its parameter, how a request says it ({} is
    the value), descriptions. `{noun}` is the tool's, `{unit}` that of a number."""

    names: list[str]
    phrases: list[str]
    describes: list[str]


def _slot(names: str, phrases: str, describes: str) -> _Slot:
    return _Slot(names.split(), phrases.split("/"), describes.split("/"))


_SLOTS = {
    "path": _slot("path file filename source input document image file_path target location picture", "in {}/from {}/to {}/of {}/with {}", "Path of the file/The file/File to {verb}/Which file/Path to the {noun}"),
    "url": _slot("url address link page site", "on {}/from {}/at {}/of {}", "The address/Address of the page/Link to the {noun}"),
    "int": _slot("{unit} {unit} n_{unit} {unit}_count amount number count value quantity how_many", "for {} {unit}/by {} {unit}/to {} {unit}/of {} {unit}/with {} {unit}/within {} {unit}/after {} {unit}", "Number of {unit}/How many {unit}/Amount in {unit}/{unit}/The {unit} of the {noun}"),
    "decimal": _slot("{unit} {unit} amount value weight size level", "of {} {unit}/by {} {unit}/to {} {unit}/with {} {unit}", "In {unit}/How many {unit}/Value in {unit}/{unit}"),
    "place": _slot("city location place town where area region spot", "in {}/in {}/at {}/near {}/around {}", "The city/City or place/Where/Name of the place/Place of the {noun}/Location"),
    "from": _slot("from origin start source departure from_city start_place", "from {}", "Where it begins/City of departure/Origin/The first city"),
    "to": _slot("to destination target end arrival to_city end_place", "to {}", "Where it ends/City of arrival/Destination/The last city"),
    "name": _slot("person recipient name user author owner contact who guest customer writer receiver", "for {}/to {}/with {}/by {}/of {}", "Name of the person/The person/Who gets the {noun}/Who/Full name/Owner of the {noun}"),
    "date": _slot("date day on when start due deadline start_date", "on {}/for {}/on {}/from {}/until {}", "The date/Day of the {noun}/When/On which day"),
    "clock": _slot("time at start hour clock begin start_time", "at {}/at {}/starting at {}/before {}/from {}", "Time of day/The time/When it starts/Hour of the {noun}"),
    "email": _slot("email address mail recipient to send_to account", "to {}/for {}/with {}", "Email address/Address of the person/Where to send it"),
    "phrase": _slot("title name text subject label message query topic content body note comment", "called {q}/titled {q}/saying {q}/with the text {q}/about {}/that says {q}/: {}/named {q}", "The text/Title of the {noun}/Any text/Name of the {noun}/Words of the {noun}/What it says"),
    "code": _slot("id number code ref key serial {noun}_id {noun}_number device", "number {}/with the code {}/with id {}/of {}/for {}/{}", "Number of the {noun}/Id/Code of the {noun}/The device"),
    "names": _slot("people guests names members attendees persons team friends", "with {}/for {}/to {}", "The people/List of names/Who comes/Names"),
    "enum": _slot("mode type kind category size level state status style format action option", "as {}/in {} mode/set to {}/in {}", "/One of the values/Kind of {noun}/Which one"),
    "bool": _slot("{flag} {flag} {flag} is_{flag} {flag}_mode", "{flag}/and {flag}/as {flag}/, {flag}", "Whether it is {flag}/{flag} or not/True if {flag}/"),
    "word": _slot("name item product label key tag room table thing word object zone symbol", "called {}/of {}/for {}/with {}/in the {}/on {}", "Name of the {noun}/The thing/Which {noun}/Any word"),
}  # fmt: skip
# Kinds that a reader could take for each other; the second gives way.
_ALIKE = [("place", "from"), ("place", "to"), ("name", "names"), ("word", "phrase"), ("path", "url"),
          ("int", "decimal"), ("code", "word"), ("to", "name"), ("to", "names")]  # fmt: skip
_UNITS = """days minutes hours degrees percent kilos people guests pages rows seconds nights meters
liters miles seats points euros dollars weeks steps pieces times grams pixels copies""".split()
_COMMANDS = ["{V} {o}{m}.", "{V} {o}{m}.", "{V} {o}{m}.", "{V} {o}{m}", "Please {v} {o}{m}.",
             "Can you {v} {o}{m}?", "I need to {v} {o}{m}.", "I want to {v} {o}{m}.",
             "Could you {v} {o}{m}?", "{V} {o}{m}, please.", "We have to {v} {o}{m}.",
             "You should {v} {o}{m}.", "Help me {v} {o}{m}.", "Go and {v} {o}{m}.",
             "{V} {o} now{m}.", "How do I {v} {o}{m}?", "Try to {v} {o}{m}."]  # fmt: skip
_QUESTIONS = ["When does the {n} {v}{m}?", "Does the {n} {v}{m}?", "Where does the {n} {v}{m}?",
              "Why does the {n} {v}{m}?", "How much does the {n} {v}{m}?",
              "What does the {n} {v}{m}?", "Will the {n} {v}{m}?", "Which {n} do I {v}{m}?",
              "Should we {v} the {n}{m}?", "Who can {v} the {n}{m}?"]  # fmt: skip
_NOUN_ONLY = ["What is the {n}{m}?", "How {a} is the {n}{m}?", "Is there a {n}{m}?", "Where is the {n}{m}?",
              "I need a {n}{m}.", "I need a {a} {n}{m}.", "Give me the {n}{m}.", "Show me the {n}{m}.",
              "Tell me the {n}{m}.", "{N}{m}?", "{N}{m}, please.", "Do we have a {n}{m}?",
              "What {n} is there{m}?", "I am looking for a {n}{m}.", "Is the {n} {a}{m}?",
              "What about the {n}{m}?", "I want the {n}{m}.", "How is the {n}{m}?",
              "How many {n} are there{m}?", "Any {n}{m}?", "Who has the {n}{m}?"]  # fmt: skip
_ADJECTIVES = """high low warm cold big small long fast far old new cheap good deep strong late early
free heavy bright full dry wet quick""".split()


def implied(w: Words, verb: str = "", noun: str = "") -> Made:
    """A tool whose request is an ordinary sentence that names no parameter."""
    r = w.rng
    given = bool(verb or noun)
    verb, noun = _names(w, verb, noun)
    kinds = r.sample(list(_SLOTS), r.choice([1, 1, 1, 2, 2, 2, 3, 3, 4]))
    for one, other in _ALIKE:
        if one in kinds and other in kinds:
            kinds.remove(other)
    params: list[tuple[str, Json, bool]] = []
    arguments: Json = {}
    mods: list[str] = []
    objects: list[str] = []
    for kind in kinds:
        unit = r.choice(_UNITS) if r.random() < 0.6 else f"{w.any_word()}s"
        flag = w.draw("flag").replace("_", " ")
        words = {"unit": unit, "noun": noun, "verb": verb, "flag": flag}
        slot = _SLOTS[kind]
        what = _choices(w) if kind == "enum" else {"from": "place", "to": "place"}.get(kind, kind)
        name = r.choice(slot.names).format(**words).replace(" ", "_")
        say = r.choice([*slot.describes, ""]).format(**words)
        if r.random() < 0.25:  # only the description says what it is
            name = w.any_word()
            said = [d for d in slot.describes if d] or [f"One of {what}".replace(",", ", ")]
            say = r.choice(said).format(**words)
        if name in [p[0] for p in params]:
            name = w.any_word()
        say = say[:1].upper() + say[1:]
        optional = r.random() < 0.3
        params.append((name, schema("list" if kind == "names" else what, say), optional))
        if optional and len(kinds) > 1 and r.random() < 0.4:
            continue
        phrase = r.choice(slot.phrases)
        if kind == "bool":
            arguments[name] = True
            if r.random() < 0.25:
                arguments[name], phrase = False, "not {flag}"
            shown = ""
        else:
            arguments[name], shown = _value(w, what)
        quoted = f"'{shown}'" if not shown.startswith("'") else shown
        bare = "{} {unit}" if kind in ("int", "decimal") else "{}"
        text = phrase.replace("{q}", r.choice(["{}", quoted, quoted.replace("'", '"')]))
        if kind in ("path", "word", "code", "url", "phrase") and not objects and r.random() < 0.35:
            plain = r.choice([bare, "the {noun} {}", "{noun} {}"])
            objects.append(_fill(plain, shown, words))
        elif kind == "enum" and r.random() < 0.3 and not objects:
            objects.append(_fill("the {} {noun}", shown, words))
        else:
            mods.append(_fill(text, shown, words))
    r.shuffle(mods)
    # A free text without quotes ends the sentence, else nobody knew where it ends.
    mods.sort(key=lambda m: m.startswith((":", "about")))
    m = "".join(t if t.startswith((":", ",")) else f" {t}" for t in mods)
    names_noun = not objects or noun in objects[0]
    o = objects[0] if objects else f"{r.choice(['the', 'a', 'my', 'this', 'our'])} {noun}"
    x = r.random()
    questions = not objects and not given
    forms = (
        _NOUN_ONLY if x < 0.3 and questions else _QUESTIONS if x < 0.45 and questions else _COMMANDS
    )
    text = r.choice(forms).format(
        v=verb, V=_upper(verb), n=noun, N=_upper(noun), o=o, m=m, a=r.choice(_ADJECTIVES)
    )
    text = text[0].upper() + text[1:]
    # At least one word of the request stands in the schema; often the name alone does not have it.
    shared = noun if forms is _NOUN_ONLY else verb if not names_noun else r.choice([verb, noun])
    other = w.any_word()
    name = r.choice(["{v}_{n}", "{v}_{n}", "{n}_{v}", "{s}", "{s}_{x}", "{x}_{s}", "get_{s}", "{x}",
                     "{v}-{n}", "{v}{N}", "{s}_tool", "do_{s}"])  # fmt: skip
    if given:
        name = r.choice(["{v}_{n}", "{n}_{v}", "{v}-{n}", "{v}{N}"])
    name = name.format(v=verb, n=noun, N=_upper(noun), s=shared, x=other)
    about = r.choice(["in a city", "of a place", "for somebody", "by its name", "", "", ""])
    description = r.choice([
        "{V} a {n} {x}", "{V} the {n} {x}", "{V} {n} {x}", "When the {n} {v}s {x}", "{N} {v} {x}",
        "{V}s the {n} {x}", "Tool to {v} the {n} {x}", "{V} something, the {n} {x}",
    ]).format(v=verb, V=_upper(verb), n=noun, N=_upper(noun), x=about).strip()  # fmt: skip
    made = function(w, name, description, params)
    if shared not in name:
        made = {"name": name, "description": description, "parameters": made["parameters"]}
    keys = [noun if r.random() < 0.4 else w.draw("field") for _ in range(r.randint(1, 2))]
    return Made(made, text, arguments, list(dict.fromkeys(keys)), (verb, noun))


def _upper(word: str) -> str:
    return word[0].upper() + word[1:]


def _fill(pattern: str, value: str, words: dict[str, str]) -> str:
    """`pattern` with its names and, last, the value: a value's braces stay text."""
    for key, word in words.items():
        pattern = pattern.replace("{" + key + "}", word)
    return pattern.replace("{}", value)


def make(w: Words) -> Made:
    x = w.rng.random()
    return known(w) if x < 0.36 else composed(w) if x < 0.66 else implied(w)


def likely(w: Words) -> Made:
    """A tool as evaluation has counted them from the beginning: known or composed."""
    return known(w) if w.rng.random() < 0.42 else composed(w)


def several(w: Words, n: int, make: Callable[[Words], Made] = make) -> list[Made]:
    """`n` tools of which a request fits one only; now and then all share a verb or a noun."""
    r = w.rng
    verb, noun = _names(w, "", "")
    shares, shares_verb = n > 1 and r.random() < 0.2, r.random() < 0.5

    def alike(w: Words) -> Made:
        one = implied if r.random() < 0.4 else composed
        return one(w, verb=verb) if shares_verb else one(w, noun=noun)

    made: list[Made] = []
    while len(made) < n:
        new = alike(w) if shares else make(w)
        if not any(
            new.name == m.name or new.words == m.words or new.results is m.results for m in made
        ):
            made.append(new)
    r.shuffle(made)
    return made


def stranger(w: Words, made: list[Made]) -> Made | None:
    """A tool that could do what none of `made` can; None if the draw came too close to one."""
    other = make(w)
    said = json.dumps([m.function for m in made], ensure_ascii=False).lower()
    if any(other.results is m.results for m in made):
        return None
    return None if any(word.lower() in said for word in other.words) else other


def result(w: Words, made: Made) -> tuple[str, str]:
    """What the tool gave back, and the sentence that reports it."""
    r = w.rng
    if r.random() < 0.08:
        reason = r.choice(["not found", "no access", "timeout", "bad value", w.phrase(2, 3)])
        text = r.choice([f"Error: {reason}", json.dumps({"error": reason})])
        return text, f"The tool failed: {reason}."
    if r.random() < 0.12:
        text = r.choice([w.phrase(3, 7), w.sentence()])
        return text, f"The tool says: {text}"
    values: Json = {}
    for key in made.results:
        values[key] = _result_value(w, key)
    said = []
    for key, v in values.items():
        shown = _join([str(i) for i in v]) if isinstance(v, list) else str(v)
        said.append(f"The {key.replace('_', ' ')} is {shown}.")
    return json.dumps(values, ensure_ascii=False), " ".join(said)


def _result_value(w: Words, key: str) -> Any:
    r = w.rng
    if key == "status":
        return r.choice(["ok", "done", "sent", "saved", "pending", "booked", "closed"])
    if key in ("sky",):
        return r.choice(["clear", "cloudy", "rainy", "sunny", "windy", "grey"])
    if key in ("files", "matches", "rows"):
        return [w.any_word() for _ in range(r.randint(1, 3))]
    if key in ("text", "meaning", "output", "translation", "title", "recipe"):
        return w.phrase(2, 5)
    if key in ("id", "code", "hash", "flight"):
        return w.code()
    if key in ("time", "zone"):
        return w.clock()
    if key in ("date",):
        return w.date()
    if key in ("name",):
        return w.name()
    if key in ("email", "url"):
        return w.email() if key == "email" else w.url()
    if key in ("price", "rate", "amount", "balance", "change", "km", "value", "total"):
        return w.decimal()
    if made_number(key) or r.random() < 0.5:
        return w.integer()
    return w.string(key)


def made_number(key: str) -> bool:
    return key in {"temp", "high", "low", "wind", "days", "minutes", "distance", "bytes", "count",
                   "result", "sum", "product", "number", "passed", "failed", "population",
                   "pressure"}  # fmt: skip
