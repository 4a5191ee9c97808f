// Send messages one after the other and print what became of each, a JSON line per message.
// The only argument: {"namesrv", "group", "messages": [{"topic", "body", "tag", "keys", "shardingKey", "delayLevel",
// "properties"}], "account": {"accessKey", "secretKey"}}; all of a message but topic and body, and the account, may be
// left out.
'use strict';

const { Message, Producer } = require('ali-ons');

async function main({ namesrv, group, messages, account }) {
  // An HTTP client is asked for even where no name server is looked up with it.
  const producer = new Producer({ nameSrv: namesrv, producerGroup: group, httpclient: {}, ...account });
  producer.on('error', error => console.error(error));
  await producer.ready();
  for (const wanted of messages) {
    const message = new Message(wanted.topic, wanted.tag || '', wanted.body);
    Object.assign(message.properties, wanted.properties);
    if (wanted.keys) message.keys = wanted.keys;
    if (wanted.shardingKey) message.shardingKey = wanted.shardingKey;
    if (wanted.delayLevel) message.delayTimeLevel = wanted.delayLevel;
    const { sendStatus, msgId, messageQueue, queueOffset } = await producer.send(message);
    const queueId = Number(messageQueue.queueId); // the client keeps the text of the reply's header
    console.log(JSON.stringify({ body: wanted.body, sendStatus, msgId, queueId, queueOffset }));
  }
  process.exit(0);
}

main(JSON.parse(process.argv[2])).catch(error => {
  console.error(error);
  process.exit(1);
});
