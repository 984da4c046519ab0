// Writes tests/router/zod_schemas.json: JSON schemas as zod 4 and zod-to-json-schema write them.
//   npm install zod@4 zod-to-json-schema@3 zod3@npm:zod@3 && node tests/router/zod_schemas.mjs > tests/router/zod_schemas.json
import { zodToJsonSchema } from "zod-to-json-schema";
import * as z4 from "zod";
import * as z3 from "zod3";

const common = (z) => ({
  string: z.string(),
  bounded: z.string().min(2).max(9),
  regex: z.string().regex(/^[a-z]+\/[0-9]{2}$/),
  password: z.string().regex(/^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,}$/),
  notBlank: z.string().regex(/^(?!\s*$).+/),
  behind: z.string().regex(/^[a-z]+(?<!x)$/),
  word: z.string().regex(/\bword\b/),
  prefixed: z.string().startsWith("ab").endsWith("z"),
  email: z.string().email(),
  url: z.string().url(),
  uuid: z.string().uuid(),
  datetime: z.string().datetime(),
  date: z.string().date(),
  time: z.string().time(),
  duration: z.string().duration(),
  base64: z.string().base64(),
  cuid2: z.string().cuid2(),
  nanoid: z.string().nanoid(),
  emoji: z.string().emoji(),
  number: z.number(),
  int: z.number().int(),
  positive: z.number().positive(),
  range: z.number().gte(-2).lt(7.5),
  step: z.number().multipleOf(0.25),
  boolean: z.boolean(),
  null: z.null(),
  any: z.any(),
  unknown: z.unknown(),
  never: z.object({ a: z.string(), b: z.never().optional() }),
  literal: z.literal("on"),
  numberLiteral: z.literal(7),
  enum: z.enum(["red", "green", "blue"]),
  nativeEnum: z.nativeEnum({ A: 1, B: "b" }),
  array: z.array(z.string()),
  boundedArray: z.array(z.number().int()).min(1).max(3),
  nonempty: z.array(z.boolean()).nonempty(),
  tuple: z.tuple([z.string(), z.number()]),
  tupleRest: z.tuple([z.string()]).rest(z.boolean()),
  object: z.object({ a: z.string().describe("first"), b: z.number().optional() }),
  strict: z.object({ a: z.string() }).strict(),
  loose: z.object({ a: z.string() }).passthrough(),
  catchall: z.object({ a: z.string() }).catchall(z.number()),
  partial: z.object({ a: z.string(), b: z.string() }).partial(),
  optional: z.object({ a: z.string().optional() }),
  nullable: z.string().nullable(),
  nullish: z.object({ a: z.number().nullish() }),
  default: z.object({ a: z.string().default("x"), b: z.number().int().default(3) }),
  catch: z.object({ a: z.number().catch(1) }),
  readonly: z.object({ a: z.array(z.string()).readonly() }),
  record: z.record(z.string(), z.number()),
  keyed: z.record(z.string().min(2), z.boolean()),
  patterned: z.record(z.string().regex(/^x[0-9]+$/), z.string()),
  enumKeys: z.record(z.enum(["a", "b"]), z.number()),
  union: z.union([z.string(), z.number()]),
  objectUnion: z.union([z.object({ a: z.string() }), z.object({ b: z.number() })]),
  tagged: z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("circle"), radius: z.number() }),
    z.object({ kind: z.literal("square"), side: z.number() }),
  ]),
  defaultTag: z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("circle").default("circle"), radius: z.number() }),
    z.object({ kind: z.literal("square"), side: z.number().nullable() }),
  ]),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
  looseIntersection: z.intersection(z.object({ a: z.string() }).passthrough(), z.object({ b: z.number() }).passthrough()),
  recursive: (() => {
    const node = z.object({ value: z.string(), children: z.lazy(() => z.array(node)) });
    return node;
  })(),
  refined: z.string().refine((text) => text.length > 2),
  branded: z.string().brand("id"),
  shared: (() => {
    const point = z.object({ x: z.number(), y: z.number() });
    return z.object({ from: point, to: point, via: z.array(point).optional() });
  })(),
  agentTool: z.object({
    command: z.string().min(1).describe("the command"),
    timeout: z.number().int().positive().max(600000).optional(),
    edits: z.array(z.object({ path: z.string(), old: z.string(), new: z.string(), all: z.boolean().default(false) })).min(1),
    mode: z.enum(["read", "write"]).default("read"),
  }),
});
const only4 = {
  iso: z4.object({ at: z4.iso.datetime({ offset: true }), on: z4.iso.date(), takes: z4.iso.duration() }),
  strictEmail: z4.email({ pattern: z4.regexes.rfc5322Email }),
  oldEmail: z4.string().regex(/^(?!\.)(?!.*\.\.)([A-Z0-9_'+\-\.]*)[A-Z0-9_+-]@([A-Z0-9][A-Z0-9\-]*\.)+[A-Z]{2,}$/),
  html5Email: z4.email({ pattern: z4.regexes.html5Email }),
  ipv4: z4.ipv4(),
  ipv6: z4.ipv6(),
  cidr: z4.cidrv4(),
  e164: z4.e164(),
  jwt: z4.jwt(),
  guid: z4.guid(),
  ulid: z4.ulid(),
  hostname: z4.hostname(),
  template: z4.templateLiteral(["id-", z4.number()]),
  int32: z4.int32(),
  uint32: z4.uint32(),
  float64: z4.float64(),
  stringbool: z4.stringbool(),
  partialRecord: z4.partialRecord(z4.enum(["a", "b"]), z4.string()),
  uuidKeys: z4.record(z4.uuid(), z4.int()),
  json: z4.json(),
  meta: z4.object({ a: z4.string().meta({ title: "A", examples: ["x"], deprecated: true, "x-order": 1 }) }),
  named: z4.object({ a: z4.string() }).meta({ id: "Named" }),
  file: z4.object({ data: z4.base64url() }),
  xor: z4.xor([z4.object({ a: z4.string() }), z4.object({ b: z4.string() })]),
  pair: z4.xor([z4.string(), z4.number()]),
};
const only3 = {
  set: z3.set(z3.string()),
  boundedSet: z3.set(z3.number()).max(1),
  enumSet: z3.set(z3.enum(["a", "b", "c"])),
  map: z3.map(z3.string(), z3.number()),
  bigint: z3.bigint(),
  dateObject: z3.date(),
  cuid: z3.string().cuid(),
  includes: z3.string().includes("@"),
};
const found = [];
const add = (name, make) => {
  try {
    found.push({ name, schema: JSON.parse(JSON.stringify(make())) });
  } catch (error) {
    console.error(`${name}: ${error.message}`); // zod has no JSON schema for it
  }
};
const other = /nullable|tag|set|record|keys|positive|union|intersection|tuple|nullish|agentTool|range|int32/i;
for (const target of ["draft-2020-12", "openapi-3.0"])
  for (const [name, type] of Object.entries({ ...common(z4), ...only4 }))
    if (target === "draft-2020-12" || other.test(name)) add(`zod 4, ${target}: ${name}`, () => z4.toJSONSchema(type, { target }));
for (const [name, type] of Object.entries(common(z4))) if (/default|object|strict|tagged|catch/i.test(name)) add(`zod 4, input: ${name}`, () => z4.toJSONSchema(type, { io: "input" }));
for (const target of ["jsonSchema7", "openApi3", "openAi"])
  for (const [name, type] of Object.entries({ ...common(z3), ...only3 }))
    if (target === "jsonSchema7" || other.test(name))
      add(`zod-to-json-schema, ${target}: ${name}`, () => zodToJsonSchema(type, { target }));
console.log("[\n" + found.map((each) => JSON.stringify(each)).join(",\n") + "\n]");
