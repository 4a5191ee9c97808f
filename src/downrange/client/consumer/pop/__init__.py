"""Messages that brokers lease (POP): what simple consumers and push consumers in POP mode share."""
