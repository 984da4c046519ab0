// The README's first request (docs/first-request.json), and questions to ask next.

export const EXAMPLE = `Clara hid the brass key in the cellar of the lighthouse. It was a foggy day. Otto travelled to Lisbon by ship. A \
kettle stood near the old fireplace. Mira bought 14 small candles in Bergen. The road to the harbour was wet.

Jonas gave the copper ring to Mira. Then it was quiet again for a while. Otto met Fatima at the fountain. Far \
away there was a dark mill. Jonas wrote the word marigold on the school wall. There was snow on the ground, and \
smoke in the air. Mira sold the silver compass for 37 coins. An old song about rain and bread was heard from the \
bakery.

Fatima found the torn map near the stone bridge. The windy morning went by and nothing happened. The blue \
lantern belongs to Jonas. Otto hid the long rope in the barn. Everybody spoke about the winter and the price of \
wood. Fatima told Otto that the password is WT-2290. A basket stood near the church. Some milk was left, but no \
bread.

Mira put the iron box under the stairs. Jonas travelled to Bergen by train. The evening was cloudy. Fatima \
bought 6 old books in Lisbon. The road to the castle was long. Otto gave the glass bottle to Fatima. Later the \
sky became bright.

Where did Clara hide the brass key?`;

export const FOLLOW_UPS = ["Who bought 14 small candles?", "What is the password?", "Where did Otto hide the long rope?"];
