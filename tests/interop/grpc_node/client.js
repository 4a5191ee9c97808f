// The official gRPC client of Node.js as a process: an order in JSON as its argument, JSON lines as its output.
// Orders and lines are those of ../grpc_python/client.py.
const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = require("rocketmq-client-nodejs");
const { TransactionResolution } = require("rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb");

const silent = { info() {}, warn() {}, error() {}, debug() {} };

function say(event, members = {}) {
  process.stdout.write(JSON.stringify({ event, time: Date.now() / 1000, ...members }) + "\n");
}

function base(order) {
  const user = order.account;
  const credentials = user && user.accessKey && { sessionCredentials: { accessKey: user.accessKey, accessSecret: user.secretKey } };
  return { endpoints: order.endpoints, namespace: "", logger: silent, ...credentials };
}

function shown(message) {
  return {
    body: message.body.toString(),
    size: message.body.length,
    topic: message.topic,
    tag: message.tag ?? null,
    keys: [...message.keys].sort(),
    properties: Object.fromEntries(message.properties ?? []),
    messageId: message.messageId,
    attempt: message.deliveryAttempt,
    group: message.messageGroup ?? null,
    corrupted: Boolean(message.corrupted),
  };
}

function expression(order) {
  return order.sql ? new FilterExpression(order.filter, 2) : order.filter ?? "*";
}

function untilInputEnds() {
  return new Promise((resolve) => process.stdin.resume().on("end", resolve));
}

async function produce(order) {
  const answer = { commit: TransactionResolution.COMMIT, rollback: TransactionResolution.ROLLBACK }[order.check];
  const checker = {
    async check(message) {
      say("check", shown(message));
      return answer ?? TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED;
    },
  };
  const producer = new Producer({ ...base(order), topics: order.topics, checker });
  await producer.startup();
  for (const wanted of order.messages) {
    await new Promise((resolve) => setTimeout(resolve, (order.pause ?? 0) * 1000));
    const message = {
      topic: wanted.topic,
      body: Buffer.from(wanted.body.repeat(wanted.times ?? 1)),
      tag: wanted.tag,
      keys: wanted.keys && [wanted.keys],
      properties: wanted.properties && new Map(Object.entries(wanted.properties)),
      messageGroup: wanted.group,
      delay: wanted.delay === undefined ? undefined : wanted.delay * 1000,
    };
    try {
      let receipt;
      if (wanted.transaction) {
        const transaction = producer.beginTransaction();
        receipt = await producer.send(message, transaction);
        if (wanted.transaction === "commit") await transaction.commit();
        if (wanted.transaction === "rollback") await transaction.rollback();
      } else {
        receipt = await producer.send(message);
      }
      if (wanted.recall) await producer.recallMessage(wanted.topic, receipt.recallHandle);
      say("sent", { messageId: receipt.messageId, recallHandle: receipt.recallHandle ?? null, body: wanted.body });
    } catch (error) {
      say("refused", { error: error.name, text: error.message, body: wanted.body });
    }
  }
  say("done");
  if (order.stay) await untilInputEnds();
  await producer.shutdown();
}

async function simple(order) {
  const subscriptions = new Map([[order.topic, expression(order)]]);
  const awaitDuration = (order.await ?? 5) * 1000;
  const consumer = new SimpleConsumer({ ...base(order), consumerGroup: order.group, subscriptions, awaitDuration });
  await consumer.startup();
  say("started");
  let left = order.count;
  const end = Date.now() + (order.seconds ?? 40) * 1000;
  while (left > 0 && Date.now() < end) {
    let found = [];
    try {
      found = await consumer.receive(order.batch ?? 16, (order.invisible ?? 30) * 1000);
    } catch (error) {
      say("failed", { error: error.name, text: error.message });
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
    for (const message of found) {
      left -= 1;
      say("message", shown(message));
      if (order.nack !== undefined && message.deliveryAttempt === 1) {
        await consumer.changeInvisibleDuration(message, order.nack * 1000);
      } else if (order.ack ?? true) {
        await consumer.ack(message);
      }
    }
  }
  say("done");
  if (order.stay) await untilInputEnds();
  await consumer.shutdown();
}

async function push(order) {
  const left = { ...order.fail };
  const messageListener = {
    async consume(message) {
      say("message", shown(message));
      const body = message.body.toString();
      if (left[body] > 0) {
        left[body] -= 1;
        return ConsumeResult.FAILURE;
      }
      await new Promise((resolve) => setTimeout(resolve, (order.sleep ?? 0) * 1000));
      say("consumed", { body });
      return ConsumeResult.SUCCESS;
    },
  };
  const subscriptions = new Map([[order.topic, expression(order)]]);
  const consumer = new PushConsumer({ ...base(order), consumerGroup: order.group, subscriptions, messageListener });
  await consumer.startup();
  say("started");
  await untilInputEnds();
  await consumer.shutdown();
}

const [kind, order] = process.argv.slice(2);
({ produce, simple, push })[kind](JSON.parse(order)).then(
  () => process.exit(0),
  (error) => {
    say("ended", { error: error.name, text: error.message });
    process.exit(1);
  },
);
