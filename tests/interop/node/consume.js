// A push consumer. Prints JSON lines: {"event": "assigned", "queues"} whenever its queues change, {"event": "message", …}
// for each delivery. SIGTERM commits, leaves the group and prints {"event": "closed"}.
// The only argument: {"namesrv", "group", "topic", "tag", "broadcast", "maxReconsumeTimes", "failures", "account":
// {"accessKey", "secretKey"}}: a delivery with
// fewer than `failures` attempts behind it is refused.
'use strict';

const { Consumer } = require('ali-ons');

async function main({ namesrv, group, topic, tag, broadcast, maxReconsumeTimes, failures, account }) {
  const consumer = new Consumer({
    nameSrv: namesrv,
    httpclient: {}, // asked for even where no name server is looked up with it
    consumerGroup: group,
    isBroadcast: !!broadcast,
    maxReconsumeTimes: maxReconsumeTimes || 16,
    // The default of half a minute until a new retry topic is seen is longer than a test may take.
    pollNameServerInteval: 300,
    rebalanceInterval: 300,
    ...account,
  });
  const print = line => console.log(JSON.stringify(line));
  consumer.on('error', error => console.error(error.message));
  consumer.on(`topic_${topic}_queue_changed`, () => {
    const queues = [ ...consumer.processQueueTable.values() ].map(entry => entry.messageQueue);
    print({ event: 'assigned', queues: queues.filter(queue => queue.topic === topic).map(queue => queue.queueId) });
  });
  process.on('SIGTERM', async () => {
    await consumer.close();
    print({ event: 'closed' });
    process.exit(0);
  });
  consumer.subscribe(topic, tag || '*', async message => {
    const { reconsumeTimes, queueId, queueOffset, properties, tags, keys, bornTimestamp, msgId } = message;
    print({
      event: 'message', at: Date.now(), body: message.body.toString(),
      reconsumeTimes, queueId, queueOffset, properties, tags, keys, bornTimestamp, msgId,
    });
    if (reconsumeTimes < (failures || 0)) throw new Error('refused, as the test wants it');
  });
  await consumer.ready();
}

main(JSON.parse(process.argv[2])).catch(error => {
  console.error(error);
  process.exit(1);
});
