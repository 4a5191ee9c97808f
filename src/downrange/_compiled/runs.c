/* The module downrange._runs. */
#include "runs.h"

PyObject *s_next_offset, *s_queue_id, *s_topic, *s_topic_field;

static PyMethodDef functions[] = {
    {"parse_send", parse_send, METH_O, NULL},
    {"append_run", (PyCFunction)(void (*)(void))append_run, METH_FASTCALL, NULL},
    {"queue_entries", (PyCFunction)(void (*)(void))queue_entries, METH_FASTCALL, NULL},
    {"index_keys", (PyCFunction)(void (*)(void))index_keys, METH_FASTCALL, NULL},
    {"encode_replies", (PyCFunction)(void (*)(void))encode_replies, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "downrange._runs", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__runs(void) {
    make_crc_table();
    s_next_offset = PyUnicode_InternFromString("next_offset");
    s_queue_id = PyUnicode_InternFromString("queue_id");
    s_topic = PyUnicode_InternFromString("topic");
    s_topic_field = PyUnicode_InternFromString("topic_field");
    if (!s_next_offset || !s_queue_id || !s_topic || !s_topic_field) return NULL;
    return PyModule_Create(&definition);
}
