/* The module downrange._steps. */
#include "new_messages.h"
#include "records.h"
#include "topic_table.h"

PyObject *s_is_special, *s_queue_id, *s_row, *s_topic, *s_topic_field;

static PyMethodDef functions[] = {
    {"cut_frames", (PyCFunction)(void (*)(void))cut_frames, METH_FASTCALL, NULL},
    {"next_run", (PyCFunction)(void (*)(void))next_run, METH_FASTCALL, NULL},
    {"write_records", (PyCFunction)(void (*)(void))write_records, METH_FASTCALL, NULL},
    {"put_entries", (PyCFunction)(void (*)(void))put_entries, METH_FASTCALL, NULL},
    {"index_keys", (PyCFunction)(void (*)(void))index_keys, METH_FASTCALL, NULL},
    {"read_records", (PyCFunction)(void (*)(void))read_records, METH_FASTCALL, NULL},
    {"follow_chain", (PyCFunction)(void (*)(void))follow_chain, METH_FASTCALL, NULL},
    {"timed_records", timed_records, METH_O, NULL},
    {"put_units", (PyCFunction)(void (*)(void))put_units, METH_FASTCALL, NULL},
    {"add_due", (PyCFunction)(void (*)(void))add_due, METH_FASTCALL, NULL},
    {"encode_pull", (PyCFunction)(void (*)(void))encode_pull, METH_FASTCALL, NULL},
    {"encode_pops", (PyCFunction)(void (*)(void))encode_pops, METH_FASTCALL, NULL},
    {"take_unread", (PyCFunction)(void (*)(void))take_unread, METH_FASTCALL, NULL},
    {"cut_pops", (PyCFunction)(void (*)(void))cut_pops, METH_FASTCALL, NULL},
    {"add_checkpoints", (PyCFunction)(void (*)(void))add_checkpoints, METH_FASTCALL, NULL},
    {"add_acknowledgements", (PyCFunction)(void (*)(void))add_acknowledgements, METH_FASTCALL, NULL},
    {"hold_leases", (PyCFunction)(void (*)(void))hold_leases, METH_FASTCALL, NULL},
    {"end_leases", (PyCFunction)(void (*)(void))end_leases, METH_FASTCALL, NULL},
    {"read_acks", (PyCFunction)(void (*)(void))read_acks, METH_FASTCALL, NULL},
    {"offset_list", (PyCFunction)(void (*)(void))offset_list, METH_FASTCALL, NULL},
    {"pick_all", (PyCFunction)(void (*)(void))pick_all, METH_FASTCALL, NULL},
    {"pick_by_tags", (PyCFunction)(void (*)(void))pick_by_tags, METH_FASTCALL, NULL},
    {"pick_by_properties", (PyCFunction)(void (*)(void))pick_by_properties, METH_FASTCALL, NULL},
    {"first_usual", (PyCFunction)(void (*)(void))first_usual, METH_FASTCALL, NULL},
    {"make_outgoing", (PyCFunction)(void (*)(void))make_outgoing, METH_FASTCALL, NULL},
    {"make_send", (PyCFunction)(void (*)(void))make_send, METH_FASTCALL, NULL},
    {"make_batch", (PyCFunction)(void (*)(void))make_batch, METH_FASTCALL, NULL},
    {"encode_send", (PyCFunction)(void (*)(void))encode_send, METH_FASTCALL, NULL},
    {"take_stored_replies", (PyCFunction)(void (*)(void))take_stored_replies, METH_FASTCALL, NULL},
    {"read_usual", (PyCFunction)(void (*)(void))read_usual, METH_FASTCALL, NULL},
    {"walk_records", walk_records, METH_O, NULL},
    {"read_heads", (PyCFunction)(void (*)(void))read_heads, METH_FASTCALL, NULL},
    {"first_not_allowed", (PyCFunction)(void (*)(void))first_not_allowed, METH_FASTCALL, NULL},
    {"hmac_states", hmac_states, METH_O, NULL},
    {"split_properties", (PyCFunction)(void (*)(void))split_properties, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "downrange._steps", .m_size = -1, .m_methods = functions,
};

/* The layout of a record, which tests compare with that of model/record.py; 0 with an exception. */
static int add_record_layout(PyObject *module) {
    PyObject *layout = Py_BuildValue(
        "{sIsIsisisIsisisisi}", "MAGIC_V1", MAGIC_V1, "MAGIC_V2", MAGIC_V2, "FIXED_SIZE", FIXED_SIZE, "IPV6_EXTRA",
        IPV6_EXTRA, "CRC_MASK", CRC_MASK, "QUEUE_OFFSET_AT", QUEUE_OFFSET_AT, "PHYSICAL_OFFSET_AT", PHYSICAL_OFFSET_AT,
        "SYS_FLAG_AT", SYS_FLAG_AT, "STORE_TIMESTAMP_AT", STORE_TIMESTAMP_AT);
    int is_added = layout != NULL && PyModule_AddObjectRef(module, "RECORD_LAYOUT", layout) == 0;
    Py_XDECREF(layout);
    return is_added;
}

PyMODINIT_FUNC PyInit__steps(void) {
    make_crc_table();
    s_is_special = PyUnicode_InternFromString("is_special");
    s_queue_id = PyUnicode_InternFromString("queue_id");
    s_row = PyUnicode_InternFromString("row");
    s_topic = PyUnicode_InternFromString("topic");
    s_topic_field = PyUnicode_InternFromString("topic_field");
    if (!s_is_special || !s_queue_id || !s_row || !s_topic || !s_topic_field) return NULL;
    if (!make_reply_names() || !make_pop_names() || !make_lease_names() || !make_table_names()) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL
        && (PyModule_AddIntConstant(module, "VERSION", 6) < 0 || PyModule_AddType(module, &topic_table_type) < 0
            || add_sockets(module) < 0 || !add_new_messages(module) || !add_sends(module) || !add_record_layout(module)))
        Py_CLEAR(module);
    return module;
}
