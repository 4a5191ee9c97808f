/* Requests that repeat: their signatures are checked, and the decision is looked up: auth/signed_requests.py. */
#include "request_header.h"
#include "send.h"
#include "sha1.h"

#define MOST_FIELDS 48
#define LONGEST_VALUE 4096
#define LONGEST_KEY 1024
#define SIGNATURE_SIZE 28
#define PORT_SIZE 4
#define RESPONSE 1

/* What the header of one request says. */
typedef struct {
    int64_t code;
    const char *topic_name, *group_name; /* of the fields with topic and group, for this code; NULL: no group */
    Text account, signature, topic, group;
    int count;
    struct {
        Text name, value;
    } fields[MOST_FIELDS];
} Signed;

static int take_code(void *to, int64_t code) {
    Signed *one = to;
    int is_pull = code == 11 || code == 361;
    one->code = code;
    one->topic_name = code == 310 || code == 320 ? "b" : "topic";
    one->group_name = is_pull ? "consumerGroup" : NULL;
    return is_pull || code == 10 || code == 310 || code == 320;
}

/* Fields stay sorted by name; a name that comes twice is not usual. */
static int take_field(void *to, const Text *name, const Text *value) {
    Signed *one = to;
    if (!name->is_ascii || name->has_escapes || one->count == MOST_FIELDS) return 0;
    if (is_text(name, "AccessKey")) one->account = *value;
    else if (is_text(name, one->topic_name)) one->topic = *value;
    else if (one->group_name != NULL && is_text(name, one->group_name)) one->group = *value;
    else if (is_text(name, "Signature")) {
        int is_first = one->signature.at == NULL;
        one->signature = *value;
        return is_first;
    }
    int n = one->count++;
    for (; n > 0; n--) {
        const Text *other = &one->fields[n - 1].name;
        Py_ssize_t both = other->size < name->size ? other->size : name->size;
        int order = memcmp(other->at, name->at, (size_t)both);
        if (order == 0) order = (other->size > name->size) - (other->size < name->size);
        if (order == 0) return 0;
        if (order < 0) break;
        one->fields[n] = one->fields[n - 1];
    }
    one->fields[n].name = *name, one->fields[n].value = *value;
    return 1;
}

/* Whether the signature is that of the account whose states these are. */
static int is_signed_well(const Signed *one, const byte *states, PyObject *body) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    byte text[LONGEST_VALUE], digest[SHA1_SIZE + 1], expected[SIGNATURE_SIZE];
    Sha1 sha;
    sha1_resume(&sha, states, SHA1_BLOCK);
    for (int n = 0; n < one->count; n++) {
        const Text *value = &one->fields[n].value;
        const byte *at = value->at;
        Py_ssize_t size = value->size;
        if (value->has_escapes) {
            if (size > LONGEST_VALUE || (size = unescape(value, text)) < 0) return 0;
            at = text;
        }
        sha1_take(&sha, at, (size_t)size);
    }
    sha1_take(&sha, (const byte *)PyBytes_AS_STRING(body), (size_t)PyBytes_GET_SIZE(body));
    sha1_end(&sha, digest);
    sha1_resume(&sha, states + SHA1_SIZE, SHA1_BLOCK);
    sha1_take(&sha, digest, SHA1_SIZE);
    sha1_end(&sha, digest);
    digest[SHA1_SIZE] = 0;
    for (int n = 0; n < 7; n++) {
        uint32_t three = (uint32_t)digest[3 * n] << 16 | (uint32_t)digest[3 * n + 1] << 8 | digest[3 * n + 2];
        for (int letter = 0; letter < 4; letter++)
            expected[4 * n + letter] = (byte)letters[three >> (18 - 6 * letter) & 63];
    }
    expected[SIGNATURE_SIZE - 1] = '=';
    byte differs = one->signature.size != SIGNATURE_SIZE;
    for (int n = 0; n < SIGNATURE_SIZE && one->signature.size == SIGNATURE_SIZE; n++)
        differs |= (byte)(expected[n] ^ one->signature.at[n]);
    return !differs;
}

static byte *put_text(byte *to, const Text *text) {
    *to++ = 0;
    return put_bytes(to, text->at, text->size);
}

/* The key of the decision, as `allowed_key` of auth/signed_requests.py makes it; its size, or 0. */
static Py_ssize_t make_key(const Signed *one, PyObject *host, byte *key) {
    const Text *texts[] = {&one->account, &one->topic, &one->group};
    Py_ssize_t address = PyBytes_GET_SIZE(host) - PORT_SIZE, size = address;
    for (int n = 0; n < 3; n++) {
        if (texts[n]->has_escapes || (texts[n]->size && memchr(texts[n]->at, 0, (size_t)texts[n]->size))) return 0;
        size += texts[n]->size;
    }
    if (address < 1 || address > 16 || size > LONGEST_KEY - 40) return 0;
    byte *to = key;
    *to++ = (byte)address;
    to = put_text(put_bytes(to, PyBytes_AS_STRING(host), address), &one->account);
    *to++ = 0;
    to = put_text(put_text(put_decimal(to, one->code), &one->topic), &one->group);
    return to - key;
}

typedef struct {
    PyObject *keys, *allowed; /* borrowed */
    byte last[LONGEST_KEY];   /* the last key that was found allowed */
    Py_ssize_t last_size;
} Checking;

/* 1 when the request may pass, 0 when it must be looked at, -1 with an exception. */
static int may_pass(Checking *checking, PyObject *frame, PyObject *origin, PyObject *peer_host) {
    Signed one = {.signature = {NULL, 0, 0, 0}, .account = {(const byte *)"", 0, 0, 1}};
    one.topic = one.group = one.account;
    int64_t kind;
    RequestHeader header = {0, 0};
    if (!PyTuple_CheckExact(frame) || PyTuple_GET_SIZE(frame) != 3) return 0;
    PyObject *text = PyTuple_GET_ITEM(frame, 1), *body = PyTuple_GET_ITEM(frame, 2);
    if (!PyBytes_CheckExact(text) || !PyBytes_CheckExact(body)) return 0;
    if (!as_number(PyTuple_GET_ITEM(frame, 0), 0, 1, &kind)) return 0;
    if (!walk_header(kind, (const byte *)PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), &header, take_code, take_field,
                     &one))
        return 0;
    if (header.flag & RESPONSE || one.account.size == 0 || one.account.has_escapes || one.signature.at == NULL) return 0;
    PyObject *account = PyBytes_FromStringAndSize((const char *)one.account.at, one.account.size);
    PyObject *states = account != NULL ? PyDict_GetItemWithError(checking->keys, account) : NULL;
    Py_XDECREF(account);
    if (states == NULL || !PyBytes_CheckExact(states) || PyBytes_GET_SIZE(states) != 2 * SHA1_SIZE)
        return PyErr_Occurred() ? -1 : 0;
    if (!is_signed_well(&one, (const byte *)PyBytes_AS_STRING(states), body)) return 0;
    byte key[LONGEST_KEY];
    PyObject *host = PyObject_GetAttr(origin, peer_host);
    if (host == NULL) return -1;
    Py_ssize_t size = PyBytes_CheckExact(host) ? make_key(&one, host, key) : 0;
    Py_DECREF(host);
    if (size == 0) return 0;
    if (size == checking->last_size && !memcmp(key, checking->last, (size_t)size)) return 1;
    PyObject *object = PyBytes_FromStringAndSize((const char *)key, size);
    int found = object != NULL ? PySet_Contains(checking->allowed, object) : -1;
    Py_XDECREF(object);
    if (found == 1) memcpy(checking->last, key, (size_t)size), checking->last_size = size;
    return found;
}

/* frames, origins, at, stop, keys, allowed -> the first request that must be looked at */
PyObject *first_not_allowed(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    static PyObject *peer_host;
    int64_t at, stop;
    if (count != 6 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])
        || !as_number(args[2], 0, PyList_GET_SIZE(args[0]), &at) || !as_number(args[3], at, PyList_GET_SIZE(args[0]), &stop)
        || PyList_GET_SIZE(args[1]) < stop || !PyDict_CheckExact(args[4]) || !PySet_Check(args[5]))
        return wrong_arguments("first_not_allowed");
    if (peer_host == NULL && (peer_host = PyUnicode_InternFromString("peer_host")) == NULL) return NULL;
    Checking checking = {.keys = args[4], .allowed = args[5], .last_size = 0};
    for (; at < stop; at++) {
        int passes = may_pass(&checking, PyList_GET_ITEM(args[0], at), PyList_GET_ITEM(args[1], at), peer_host);
        if (passes < 0) return NULL;
        if (passes == 0) break;
    }
    return PyLong_FromLongLong(at);
}

/* secret -> the states of the two hashes of an HMAC-SHA1 after their first blocks */
PyObject *hmac_states(PyObject *module, PyObject *secret) {
    (void)module;
    byte key[SHA1_BLOCK] = {0}, block[SHA1_BLOCK], states[2 * SHA1_SIZE];
    if (!PyBytes_CheckExact(secret)) return wrong_arguments("hmac_states");
    Sha1 sha;
    if (PyBytes_GET_SIZE(secret) > SHA1_BLOCK) {
        sha1_begin(&sha);
        sha1_take(&sha, (const byte *)PyBytes_AS_STRING(secret), (size_t)PyBytes_GET_SIZE(secret));
        sha1_end(&sha, key);
    } else put_object(key, secret);
    for (int outer = 0; outer < 2; outer++) {
        for (int n = 0; n < SHA1_BLOCK; n++) block[n] = key[n] ^ (outer ? 0x5C : 0x36);
        sha1_begin(&sha);
        sha1_take(&sha, block, SHA1_BLOCK);
        sha1_state(&sha, states + outer * SHA1_SIZE);
    }
    return PyBytes_FromStringAndSize((const char *)states, sizeof states);
}
